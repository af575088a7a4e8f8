"""The formulas of the activations over all 65,536 bf16 values, compared with float64."""

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu import activation as gpu
from quaver.torch.nn.activation import ACTIVATIONS, _plain_backward, _plain_forward
from tests.kernels.compare import DEVICE

#: Bounds for one input: the error relative to the result, where the result is not close to zero, and the error relative
#: to the input, everywhere. A GPU's own exponential adds to it.
SMOOTH = ["silu", "gelu", "gelu_exact", "quick_gelu"]
#: Relative to the result, by activation: an exponent of -100 is rounded to 4e-6, and so is its exponential.
RELATIVE = {"silu": 1e-5, "gelu": 2e-5, "gelu_exact": 1e-5, "quick_gelu": 1e-5}
#: Relative to the input: the error that reaches a sum.
ABSOLUTE = 2e-6
#: Below this input gelu_exact's tail, less than 1e-8 of the input, loses its digits but not its magnitude.
TAIL = -5.5


def all_values() -> Tensor:
    """bf16 numbers as float32 [256, 256]; NaN and infinities among them."""
    return (
        torch.arange(65536, dtype=torch.int32, device=DEVICE)
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
        .view(256, 256)
    )


def exact(name: str, x: Tensor) -> Tensor:
    """In float64, where the lower tail of the normal distribution keeps its digits."""
    if name == "gelu_exact":
        return x * 0.5 * torch.special.erfc(-x / 2**0.5)
    if name == "gelu":
        # torch's own sums 1 and a tanh, which loses the digits in float64 too.
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
    return _plain_forward(name, (), [x])


@pytest.mark.parametrize("name", SMOOTH)
def test_a_formula_is_near_float64_at_every_bf16_value(name: str) -> None:
    x = all_values()
    y, expected = gpu.forward(name, (), [x]).double(), exact(name, x.double())
    # Infinities, and values that overflow to them, are compared by the tests of activations.
    finite = x.isfinite()
    assert y[finite].isfinite().all()
    assert y[x.isnan()].isnan().all()
    error, wide = (y - expected).abs(), x.double()
    at = finite & (expected.abs() > 2e-37)
    if name == "gelu_exact":
        at &= wide > TAIL
        tail = finite & (wide <= TAIL)
        assert (error[tail] <= 1e-8 * wide[tail].abs()).all()
    # 0 where nothing is compared: indexing with a mask would give a size that a simulated GPU does not know.
    worst = torch.where(at, error / expected.abs(), 0.0).max().item()
    input_error = torch.where(finite & (wide != 0), error / wide.abs(), 0.0).max().item()
    print(f"{name}: {worst:.1e} of the result, {input_error:.1e} of the input")
    assert worst <= RELATIVE[name]
    assert (error[finite] <= ABSOLUTE * wide[finite].abs() + 2e-37).all()


@pytest.mark.parametrize("name", SMOOTH)
def test_a_slope_is_near_float64_at_every_bf16_value(name: str) -> None:
    x = all_values()
    # Beyond these, an intermediate product overflows, or an exponential underflows; the slope is 0 or 1.
    x = torch.where(x.abs() < 80, x, 0.0)
    (slope,) = gpu.backward(name, (), torch.ones_like(x), [x])
    (expected,) = _plain_backward(name, (), torch.ones_like(x).double(), [x.double()])
    worst = (slope.double() - expected).abs().max().item()
    print(f"{name}: {worst:.1e}")
    assert worst <= 6e-6


def test_every_smooth_activation_is_measured() -> None:
    """Gated activations multiply one of these; linear ones have no rounding error."""
    straight = {"linear", "relu", "squared_relu"}
    assert {name for name, row in ACTIVATIONS.items() if not row.gated} == {*SMOOTH, *straight}
