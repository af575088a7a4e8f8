"""Test activations: within the error bound of float64, and fused codes equal the result quantized."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import activation as gpu
from quaver.torch.nn.activation import ACTIVATIONS, _plain_backward, _plain_forward
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from tests.kernels.compare import DEVICE, assert_same
from tests.kernels.test_norm import relative
from tests.operands import nasty
from tests.pairs import alternating

SPECS = [
    QuantSpec(E4M3),
    QuantSpec(E5M2, scale="fp32"),
    QuantSpec(E4M3, (1, None)),
    QuantSpec(E5M2, (1, None), scale="fp32"),
    QuantSpec(E4M3, (1, 128)),
    QuantSpec(E4M3, (1, 32), "e8m0"),
]
SHAPES = [(5, 100), (128, 64)]


def options(name: str) -> tuple[float, ...]:
    # Ordinary values reach this limit.
    return (1.5, 1.702) if ACTIVATIONS[name].options else ()


def inputs(name: str, shape: tuple[int, int], together: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows, columns = shape
    row = ACTIVATIONS[name]
    if row.gated and together:
        return [(torch.randn(rows, 2 * columns, device=DEVICE) * 3).to(dtype)]
    return [(torch.randn(shape, device=DEVICE) * 3).to(dtype) for _ in range(row.inputs)]


def test_every_activation_has_its_kernels() -> None:
    assert set(gpu.KINDS) == set(ACTIVATIONS)
    assert all(gpu.KINDS[name].gated == row.gated for name, row in ACTIVATIONS.items())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forward_and_backward_keep_their_bound_of_float64(name: str, together: bool) -> None:
    shape = SHAPES[0]
    x = inputs(name, shape, together)
    g = torch.randn(shape, device=DEVICE)
    exact = [a.double() for a in x]
    assert relative(gpu.forward(name, options(name), x), _plain_forward(name, options(name), exact)) < 1e-6
    grads = gpu.backward(name, options(name), g, x)
    expected = _plain_backward(name, options(name), g.double(), exact)
    for grad, want in zip(grads, expected, strict=True):
        assert relative(grad, want) < 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_edge_cases_give_the_same_results_as_elsewhere(name: str) -> None:
    row = ACTIVATIONS[name]
    values = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 90.0, -90.0]
    )
    grid = torch.cartesian_prod(values, values).to(DEVICE)
    x = [grid[:, :1].contiguous(), grid[:, 1:].contiguous()][: row.inputs]
    activated = gpu.forward(name, options(name), x)
    # torch's own gelu of an infinity is NaN in float32 on a CPU, not in float64.
    dtype = torch.float64 if name.endswith("_exact") else torch.float32
    expected = _plain_forward(name, options(name), [a.to(dtype) for a in x]).float()
    # A subnormal product may be flushed; e to the 90 may be rounded differently.
    torch.testing.assert_close(activated, expected, rtol=2e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize(("spec", "shape"), alternating(SPECS, SHAPES, SPECS[:1]), ids=str)
def test_the_fused_codes_are_the_result_quantized(spec: QuantSpec, shape: tuple[int, int]) -> None:
    for name, dtype in (("swiglu", torch.bfloat16), ("gelu", torch.float32), ("clamped_swiglu", torch.float16)):
        x = inputs(name, shape, True, dtype)
        y = gpu.forward(name, options(name), x)
        factor = torch.tensor([8.0], device=DEVICE) if spec.per_tensor else None
        for rows, transposed in ((True, False), (True, True), (False, True)) if spec.per_tensor else ((True, False),):
            produced = gpu.activated(name, options(name), x, spec, factor, True, rows, transposed)
            assert torch.equal(produced.y, y)  # type: ignore[arg-type]
            assert produced.quantized is not None
            expected = reference.quantize(y, spec, None, factor)
            assert_same(produced.quantized, expected)
            if rows and transposed:
                assert produced.quantized.cached_transpose is not None
                assert torch.equal(produced.quantized.cached_transpose.codes(), expected.codes().t())
            assert_ends_in_zeros(produced.quantized)
            if spec.per_tensor:
                assert torch.equal(produced.amax, expected.amax)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_odd_inputs_are_quantized_as_their_result_is(spec: QuantSpec) -> None:
    for name, value in nasty((5, 40)).items():
        x = [torch.from_numpy(value).to(DEVICE).bfloat16()]
        for factor in (None, torch.tensor([0.25], device=DEVICE)) if spec.per_tensor else (None,):
            produced = gpu.activated("swiglu", (), x, spec, factor)
            assert produced.y is not None
            expected = reference.quantize(produced.y, spec, None, factor)
            if produced.quantized is not None:
                assert_same(produced.quantized, expected)
            if produced.amax is not None:
                torch.testing.assert_close(produced.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_ends_in_zeros(q: Quantized) -> None:
    for part in (q, q.cached_transpose):
        if part is not None:
            data = part.data
            base = data.as_strided((data.shape[0], data.stride(0)), (data.stride(0), 1))
            assert not base[:, data.shape[1] :].view(torch.uint8).any(), "what ends a row is zero"


def test_gate_and_value_may_have_any_layout() -> None:
    base = torch.randn(6, 300, device=DEVICE)
    gate, value = base[:, 1:101], base[:, 150:250]
    expected = gpu.forward("swiglu", (), [gate.clone(), value.clone()])
    assert torch.equal(gpu.forward("swiglu", (), [gate, value]), expected)
    assert torch.equal(
        gpu.forward("swiglu", (), [gate.t().contiguous().t(), value.reshape(2, 3, 100).view(6, 100)]), expected
    )
