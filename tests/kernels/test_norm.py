"""Test norms: within the error bound of float64, and fused codes equal the output quantized."""

import math

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import cross_entropy
from quaver.torch.backends.gpu import norm as gpu
from quaver.torch.backends.gpu.launch import workspace
from quaver.torch.nn import norm
from quaver.torch.numerics import reference
from tests.kernels.compare import DEVICE, assert_same
from tests.operands import nasty
from tests.pairs import alternating

SPECS = [
    QuantSpec(E4M3),
    QuantSpec(E5M2, scale="fp32"),
    QuantSpec(E4M3, (1, None)),
    QuantSpec(E4M3, (1, None), scale="fp32"),
    QuantSpec(E4M3, (1, 128)),
    QuantSpec(E5M2, (1, 128), scale="fp32"),
    QuantSpec(E4M3, (1, 32), "e8m0"),
]
#: The last is wider than a row that fits into registers.
SHAPES = [(3, 4), (2, 100), (3, 256), (2, 16400)]
EPS = 1e-5


def relative(result: Tensor, expected: Tensor) -> float:
    scale = expected.square().mean().sqrt().item()
    return (result.double() - expected).square().mean().sqrt().item() / scale if scale else math.inf


def parameters(kind: str, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, Tensor | None]:
    centred, averaged = norm.NORMALIZATIONS[kind]
    gamma = torch.randn(columns, device=DEVICE, dtype=dtype) if averaged else None
    return gamma, torch.randn(columns, device=DEVICE, dtype=dtype) if centred else None


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def test_every_normalization_has_its_kernels() -> None:
    assert {kind: centred for kind, (centred, _) in norm.NORMALIZATIONS.items()} == gpu.CENTRED


@pytest.mark.parametrize(("kind", "shape"), alternating(norm.NORMALIZATIONS, SHAPES, ["LayerNorm"]), ids=str)
def test_forward_and_backward_keep_their_bound_of_float64(kind: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE) * 3 + 1
    g = torch.randn(shape, device=DEVICE)
    gamma, beta = parameters(kind, shape[1])
    y, mean, inverse = gpu.forward(x, gamma, beta, kind, EPS)
    exact = norm._plain_forward(*wide(x, gamma, beta), kind, EPS)  # type: ignore[arg-type]
    assert relative(y, exact[0]) < 1e-6
    grads = gpu.backward(g, x, gamma, beta, mean, inverse, kind)
    expected = norm._plain_backward(*wide(g, x, gamma, beta, *exact[1:]), kind)  # type: ignore[arg-type]
    for grad, want in zip(grads, expected, strict=True):
        assert grad.shape == want.shape
        assert not want.numel() or relative(grad, want) < 1e-6
    assert not workspace(DEVICE).any(), "the programs' meeting place is left as it was found"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_parameter_may_be_missing(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=DEVICE) * 3 + 1
    gamma, beta = parameters("LayerNorm", shape[1])
    for given in ((gamma, None), (None, beta), (None, None)):
        exact = norm._plain_forward(*wide(x, *given), "LayerNorm", EPS)  # type: ignore[arg-type]
        assert relative(gpu.forward(x, *given, "LayerNorm", EPS)[0], exact[0]) < 1e-6


@pytest.mark.parametrize(("spec", "shape"), alternating(SPECS, SHAPES, SPECS[:1]), ids=str)
def test_the_fused_codes_are_the_output_quantized(shape: tuple[int, int], spec: QuantSpec) -> None:
    for kind, dtype in (("LayerNorm", torch.bfloat16), ("RMSNorm", torch.float32)):
        x = (torch.randn(shape, device=DEVICE) * 3 + 1).to(dtype)
        gamma, beta = parameters(kind, shape[1])
        factor = torch.tensor([8.0], device=DEVICE) if spec.per_tensor else None
        if not gpu.mode(spec, spec.per_tensor, shape[1]):
            assert shape[1] > gpu.WIDEST
            continue
        produced = gpu.normalized(x, gamma, beta, kind, EPS, spec, factor)
        y, _, _ = gpu.forward(x, gamma, beta, kind, EPS)
        assert torch.equal(produced.y, y)  # type: ignore[arg-type]
        expected = reference.quantize(y, spec, None, factor)
        assert produced.quantized is not None
        assert_same(produced.quantized, expected)
        data = produced.quantized.data
        base = data.as_strided((shape[0], data.stride(0)), (data.stride(0), 1))
        assert not base[:, shape[1] :].view(torch.uint8).any(), "what ends a row is zero, for GEMMs that read it"
        if spec.per_tensor:
            assert torch.equal(produced.amax, expected.amax)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_edge_case_values_are_quantized_like_the_output(spec: QuantSpec) -> None:
    for at, (name, value) in enumerate(nasty((3, 40)).items(), SPECS.index(spec)):
        x = torch.from_numpy(value).to(DEVICE).bfloat16()
        # Alternate, so that each kind occurs with each operand under every other spec.
        for kind in ("LayerNorm", "L2")[at % 2 :: 2]:
            gamma, beta = parameters(kind, 40)
            for factor in (None, torch.tensor([0.25], device=DEVICE)) if spec.per_tensor else (None,):
                produced = gpu.normalized(x, gamma, beta, kind, EPS, spec, factor)
                assert produced.y is not None
                expected = reference.quantize(produced.y, spec, None, factor)
                if produced.quantized is not None:
                    assert_same(produced.quantized, expected)
                if produced.amax is not None:
                    torch.testing.assert_close(produced.amax, expected.amax, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", norm.NORMALIZATIONS)
def test_nonfinite_values_spoil_their_row_as_elsewhere(kind: str, value: float) -> None:
    x = torch.randn(3, 40, device=DEVICE)
    x[1, 7] = value
    gamma, beta = parameters(kind, 40)
    y, _, _ = gpu.forward(x, gamma, beta, kind, EPS)
    expected = norm._plain_forward(x, gamma, beta, kind, EPS)[0]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_strided_and_misaligned_rows_have_the_bits_of_contiguous_rows() -> None:
    """The elements per thread, and so the order of its sums, depend on the row stride."""
    base, other = torch.randn(4, 131, device=DEVICE), torch.randn(4, 132, device=DEVICE)
    views = [t[:, :100] for t in (base, other)]
    views += [base[:, 3:103], base.t()[:100].t(), base[:2].view(2, 1, 131)[..., 31:], other[:, 4:104]]
    for x in views:
        gamma, _ = parameters("RMSNorm", 100)
        y, mean, inverse = gpu.forward(x, gamma, None, "RMSNorm", EPS)
        alone = x.clone(memory_format=torch.contiguous_format)
        assert torch.equal(y, gpu.forward(alone, gamma, None, "RMSNorm", EPS)[0])
        assert gpu.vector(gpu._rows(x)) == gpu.vector(gpu._rows(alone))
        grads = [gpu.backward(g, v, gamma, None, mean, inverse, "RMSNorm") for g, v in ((x, alone), (alone, x))]
        for grad, expected in zip(*grads, strict=True):
            assert torch.equal(grad, expected)
        assert y.shape == x.shape
        assert inverse.shape == (*x.shape[:-1], 1)


@pytest.mark.parametrize("rows", [1, 33, 100])
def test_sums_over_rows_keep_their_bound(rows: int) -> None:
    x = torch.randn(rows, 70, device=DEVICE)
    assert relative(cross_entropy.sum_rows(x), x.double().sum(0)) < 1e-6


def test_strided_parameters_are_read_in_place() -> None:
    x, g = torch.randn(4, 100, device=DEVICE), torch.randn(4, 100, device=DEVICE)
    buffer = torch.randn(100, 3, device=DEVICE)
    gamma, beta = buffer[:, 0], buffer[:, 2]
    outputs = gpu.forward(x, gamma, beta, "LayerNorm", EPS)
    expected = gpu.forward(x, gamma.clone(), beta.clone(), "LayerNorm", EPS)
    grads = gpu.backward(g, x, gamma, beta, *outputs[1:], "LayerNorm")
    for one, other in zip(
        (*outputs, *grads),
        (*expected, *gpu.backward(g, x, gamma.clone(), beta, *outputs[1:], "LayerNorm")),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("columns", [100, 8200])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_narrow_parameters_are_read_as_they_are(kind: str, columns: int) -> None:
    """The bits are those with parameters in float32; gradients are rounded to the parameters' dtype at the end."""
    x, g = (torch.randn(3, columns, device=DEVICE).bfloat16() for _ in range(2))
    wide = [None if p is None else p.bfloat16().float() for p in parameters(kind, columns)]
    narrow = [None if p is None else p.bfloat16() for p in wide]
    expected, ours = gpu.forward(x, *wide, kind, EPS), gpu.forward(x, *narrow, kind, EPS)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    _, mean, inverse = expected
    dx, *sums = gpu.backward(g, x, *wide, mean, inverse, kind)
    dx_narrow, *rounded = gpu.backward(g, x, *narrow, mean, inverse, kind)
    assert torch.equal(dx_narrow, dx)
    for a, b in zip(rounded, sums, strict=True):
        assert torch.equal(a, b.to(a.dtype))
    assert rounded[0].dtype is torch.bfloat16
