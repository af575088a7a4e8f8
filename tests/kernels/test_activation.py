"""Activations: within their bound of float64, and what is quantized on the way equals the result quantized."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch import reference
from quaver.torch.activation import ACTIVATIONS, _plain_backward, _plain_forward
from quaver.torch.gpu import activation as gpu
from quaver.torch.gpu.launch import workspace
from quaver.torch.quantized import Quantized
from tests.kernels.compare import DEVICE, assert_same
from tests.kernels.test_norm import relative
from tests.operands import nasty

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
    # A limit that ordinary values reach.
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
    grads, tops = gpu.gradients(name, options(name), g, x, measure=True)
    expected = _plain_backward(name, options(name), g.double(), exact)
    for found, top, want in zip(grads, tops, expected, strict=True):
        assert relative(found, want) < 1e-6
        assert top is not None
        assert top.item() == found.abs().max().item()
    assert not workspace(DEVICE).any(), "the programs' meeting places are left as they were found"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_that_hurt_give_what_they_give_elsewhere(name: str) -> None:
    row = ACTIVATIONS[name]
    values = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 90.0, -90.0]
    )
    grid = torch.cartesian_prod(values, values).to(DEVICE)
    x = [grid[:, :1].contiguous(), grid[:, 1:].contiguous()][: row.inputs]
    found = gpu.forward(name, options(name), x)
    # torch's own gelu of an infinity is NaN in float32 on a CPU, not in float64.
    dtype = torch.float64 if name.endswith("_exact") else torch.float32
    expected = _plain_forward(name, options(name), [a.to(dtype) for a in x]).float()
    # A subnormal product may be flushed; e to the 90 may round otherwise.
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_quantized_is_the_result_quantized(spec: QuantSpec, shape: tuple[int, int]) -> None:
    for name, dtype in (("swiglu", torch.bfloat16), ("gelu", torch.float32), ("clamped_swiglu", torch.float16)):
        x = inputs(name, shape, True, dtype)
        y = gpu.forward(name, options(name), x)
        factor = torch.tensor([8.0], device=DEVICE) if spec.per_tensor else None
        for rows, turned in ((True, False), (True, True), (False, True)) if spec.per_tensor else ((True, False),):
            made = gpu.activated(name, options(name), x, spec, factor, True, rows, turned)
            assert torch.equal(made.y, y)  # type: ignore[arg-type]
            assert made.quantized is not None
            expected = reference.quantize(y, spec, None, factor)
            assert_same(made.quantized, expected)
            if rows and turned:
                assert made.quantized.twin is not None
                assert torch.equal(made.quantized.twin.codes(), expected.codes().t())
            assert_ends_in_zeros(made.quantized)
            if spec.per_tensor:
                assert torch.equal(made.amax, expected.amax)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_odd_inputs_are_quantized_as_their_result_is(spec: QuantSpec) -> None:
    for name, value in nasty((5, 40)).items():
        x = [torch.from_numpy(value).to(DEVICE).bfloat16()]
        for factor in (None, torch.tensor([0.25], device=DEVICE)) if spec.per_tensor else (None,):
            made = gpu.activated("swiglu", (), x, spec, factor)
            assert made.y is not None
            expected = reference.quantize(made.y, spec, None, factor)
            if made.quantized is not None:
                assert_same(made.quantized, expected)
            if made.amax is not None:
                torch.testing.assert_close(made.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


def assert_ends_in_zeros(q: Quantized) -> None:
    for part in (q, q.twin):
        if part is not None:
            data = part.data
            base = data.as_strided((data.shape[0], data.stride(0)), (data.stride(0), 1))
            assert not base[:, data.shape[1] :].view(torch.uint8).any(), "what ends a row is zero"


def factors_for(spec: QuantSpec, x: list[Tensor]) -> list[Tensor]:
    return [torch.tensor([8.0 / 4**i], device=DEVICE) for i, _ in enumerate(x)] if spec.per_tensor else []


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_in_eight_bits_are_the_gradients_quantized(name: str, together: bool, spec: QuantSpec) -> None:
    dtype = (torch.bfloat16, torch.float32, torch.float16)[len(name) % 3]
    for shape in ((5, 100), (6, 41)):
        x, g = inputs(name, shape, together, dtype), torch.randn(shape, device=DEVICE).to(dtype)
        grads, tops = gpu.gradients(name, options(name), g, x, measure=True)
        made = gpu.quantized_gradients(name, options(name), g, x, spec, factors_for(spec, x))
        factors = factors_for(spec, x) or [None] * len(x)
        for q, grad, top, factor in zip(made, grads, tops, factors, strict=True):
            assert_same(q, reference.quantize(grad, spec, None, factor))
            assert_ends_in_zeros(q)
            assert q.amax is None or torch.equal(q.amax, top)  # type: ignore[arg-type]
    assert not workspace(DEVICE).any(), "the programs' meeting places are left as they were found"


@pytest.mark.parametrize("shape", [(5, 100), (6, 41), (128, 64), (130, 72)], ids=str)
@pytest.mark.parametrize("together", [True, False])
def test_transposed_gradients_have_the_codes_of_those_that_lie(shape: tuple[int, int], together: bool) -> None:
    spec = QuantSpec(E5M2)
    for name in ("swiglu", "gelu"):
        x, g = inputs(name, shape, together, torch.bfloat16), torch.randn(shape, device=DEVICE).bfloat16()
        both = gpu.quantized_gradients(name, (), g, x, spec, factors_for(spec, x), True, True)
        alone = gpu.quantized_gradients(name, (), g, x, spec, factors_for(spec, x), False, True)
        grads, _ = gpu.gradients(name, (), g, x)
        for q, turned, grad, factor in zip(both, alone, grads, factors_for(spec, x), strict=True):
            expected = reference.quantize(grad, spec, None, factor)
            assert_same(q, expected)
            assert_same(turned, expected)
            assert q.twin is not None
            assert torch.equal(q.twin.codes(), expected.codes().t())
            assert_ends_in_zeros(q)
            assert_ends_in_zeros(turned)


@pytest.mark.parametrize("spec", SPECS[:4], ids=str)
def test_odd_gradients_are_quantized_as_they_are(spec: QuantSpec) -> None:
    for name, value in nasty((5, 40)).items():
        x = [torch.from_numpy(value).to(DEVICE).bfloat16()]
        g = torch.randn(5, 20, device=DEVICE).bfloat16()
        for gradient, given in ((g, x), (x[0][:, 20:], [torch.randn(5, 40, device=DEVICE).bfloat16()])):
            grads, _ = gpu.gradients("swiglu", (), gradient, given)
            (made,) = gpu.quantized_gradients("swiglu", (), gradient, given, spec, factors_for(spec, given))
            expected = reference.quantize(grads[0], spec, None, (factors_for(spec, given) or [None])[0])
            assert_same(made, expected)
            if made.amax is not None:
                torch.testing.assert_close(made.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


def test_gradients_that_no_kernel_writes_are_refused_before_any_work() -> None:
    x, g = inputs("swiglu", (4, 32), True), torch.randn(4, 32, device=DEVICE)
    with pytest.raises(AssertionError, match="quantize them after"):
        gpu.quantized_gradients("swiglu", (), g, x, QuantSpec(E4M3, (1, 32), "e8m0"))
    with pytest.raises(AssertionError, match="0 factors for 1 gradients"):
        gpu.quantized_gradients("swiglu", (), g, x, QuantSpec(E4M3))
    with pytest.raises(AssertionError, match="transposed"):
        gpu.quantized_gradients("swiglu", (), g, x, QuantSpec(E4M3, (1, None)), (), True, True)


def test_gate_and_value_may_lie_anywhere() -> None:
    base = torch.randn(6, 300, device=DEVICE)
    gate, value = base[:, 1:101], base[:, 150:250]
    expected = gpu.forward("swiglu", (), [gate.clone(), value.clone()])
    assert torch.equal(gpu.forward("swiglu", (), [gate, value]), expected)
    assert torch.equal(
        gpu.forward("swiglu", (), [gate.t().contiguous().t(), value.reshape(2, 3, 100).view(6, 100)]), expected
    )
