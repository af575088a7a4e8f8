"""Scales for 128 elements of a row and for squares of 128: both directions equal the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import quantize as gpu
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from tests.kernels.compare import DEVICE, assert_padded, assert_same
from tests.operands import every_nth, nasty
from tests.pairs import alternating

RUNS, SQUARES = QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3, (128, 128))
SPECS = [RUNS, SQUARES, QuantSpec(E5M2, (1, 128), "fp32"), QuantSpec(E4M3, (128, 128), "fp32")]
SHAPES = [(128, 128), (5, 7), (130, 150)]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x).to(DEVICE).to(dtype) for name, x in nasty(shape).items()}


def assert_laid_out(q: Quantized) -> None:
    """Scales as cuBLAS reads them: see `quaver.torch.backends.gpu.rowwise`."""
    assert_padded(q)
    assert isinstance(q.scale, Tensor)
    (rows, k), scale = q.shape, q.scale
    if q.spec == SQUARES:
        assert scale.stride() == (-(-k // 512) * 4, 1)
        assert not scale.as_strided((len(scale), scale.stride(0)), scale.stride())[:, scale.shape[1] :].any()
    elif q.spec.block == (1, 128):
        assert scale.stride() == (1, rows)


@pytest.mark.parametrize(("spec", "shape"), alternating(SPECS, SHAPES, SPECS[:2]), ids=str)
def test_both_directions_equal_the_reference(spec: QuantSpec, shape: tuple[int, int]) -> None:
    at = SPECS.index(spec) + SHAPES.index(shape)
    for x in every_nth(operands(shape, torch.bfloat16), at, 3).values():
        q, transposed = gpu.quantize_both(x, spec, spec)
        assert_same(q, reference.quantize(x, spec))
        assert_same(transposed, reference.quantize(x.t(), spec))
        for part in (q, transposed):
            assert_laid_out(part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_one_direction_of_any_strides_equals_the_reference(spec: QuantSpec, dtype: torch.dtype) -> None:
    base = torch.randn(140, 300, device=DEVICE).to(dtype)
    for x in (base, base.t(), base[:, 16:200], base[::2, ::3]):
        q = gpu.quantize(x, spec)
        assert_same(q, reference.quantize(x, spec))
        assert_laid_out(q)
        q, transposed = gpu.quantize_both(x, spec, spec)
        assert_same(q, reference.quantize(x, spec))
        assert_same(transposed, reference.quantize(x.t(), spec))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_given_amaxes_replace_measured_ones(spec: QuantSpec, transposed: bool) -> None:
    x = torch.randn(150, 270, device=DEVICE)
    x = x.t() if transposed else x
    x[3, 5], x[140, 149] = torch.inf, torch.nan
    amax = torch.rand(spec.blocks(*x.shape), device=DEVICE) * 8
    amax[0, 0], amax[-1, -1] = 0.0, torch.nan
    assert_same(gpu.quantize(x, spec, amax), reference.quantize(x, spec, amax))
    if spec.transposable:
        q, other = gpu.quantize_both(x, spec, spec, amax)
        assert_same(q, reference.quantize(x, spec, amax))
        assert_same(other, reference.quantize(x.t(), spec, amax.t()))


def test_more_rows_than_a_grids_second_axis_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quaver.torch.backends.gpu.tensorwise.SECOND_AXIS", 1)
    x = torch.randn(300, 131, device=DEVICE)
    for spec in SPECS[:2]:
        q, transposed = gpu.quantize_both(x, spec, spec)
        assert_same(q, reference.quantize(x, spec))
        assert_same(transposed, reference.quantize(x.t(), spec))
