"""One scale for each row, of an operand and of its transpose, equals the reference bit for bit."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import quantize as gpu
from quaver.torch.backends.gpu import rowwise
from quaver.torch.numerics import reference
from tests.kernels.compare import DEVICE, assert_padded, assert_same
from tests.operands import every_nth, nasty

ROWS, RATIO = QuantSpec(E4M3, (1, None)), QuantSpec(E5M2, (1, None), "fp32")
SHAPES = [(64, 64), (5, 7), (33, 200), (130, 16)]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x).to(DEVICE).to(dtype) for name, x in nasty(shape).items()}


def assert_both(x: Tensor, spec: QuantSpec, other: QuantSpec) -> None:
    q, transposed = gpu.quantize_both(x, spec, other)
    assert_same(q, reference.quantize(x, spec))
    assert_same(transposed, reference.quantize(x.t(), other))
    for part in (q, transposed):
        assert_padded(part)
        assert isinstance(part.scale, Tensor)
        assert part.scale.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [ROWS, RATIO], ids=str)
def test_both_directions_equal_the_reference(spec: QuantSpec, shape: tuple[int, int]) -> None:
    for x in every_nth(operands(shape, torch.bfloat16), SHAPES.index(shape) + (spec == ROWS), 2).values():
        assert_both(x, spec, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_direction_of_any_strides_equals_the_reference(dtype: torch.dtype) -> None:
    base = torch.randn(70, 150, device=DEVICE).to(dtype)
    for x in (base, base.t(), base[:, 16:100], base[::2, ::3]):
        assert_same(gpu.quantize(x, ROWS), reference.quantize(x, ROWS))
        assert_both(x, ROWS, RATIO)


def test_rows_longer_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "LONGEST", 100)
    monkeypatch.setattr(rowwise, "LONG_BLOCK", (2, 64, 4))
    for at, shape in enumerate(((5, 128), (3, 150))):
        for x in every_nth(operands(shape, torch.bfloat16), at, 2).values():
            assert_both(x, ROWS, ROWS)


def test_programs_that_take_rows_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(rowwise, "REGISTER_ELEMENTS_BOTH", 256)
    monkeypatch.setattr(rowwise, "AMAX_BLOCK", (16, 32, 4))
    for shape in ((64, 64), (70, 50)):
        x = torch.randn(shape, device=DEVICE)
        x[3, 5], x[60, 2] = torch.nan, torch.inf
        assert_both(x, ROWS, ROWS)
        assert_same(gpu.quantize(x.t(), ROWS), reference.quantize(x.t(), ROWS))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", [ROWS, RATIO], ids=str)
def test_given_amaxes_replace_measured_ones(spec: QuantSpec, transposed: bool) -> None:
    x = torch.randn(48, 70, device=DEVICE)
    x = x.t() if transposed else x
    x[3, 5] = torch.inf
    amax = torch.rand(len(x), 1, device=DEVICE) * 8
    amax[0], amax[1] = 0.0, torch.nan
    assert_same(gpu.quantize(x, spec, amax), reference.quantize(x, spec, amax))
    assert_same(gpu.quantize(x, spec, 3.0), reference.quantize(x, spec, 3.0))


def test_a_block_factor_uses_the_reference() -> None:
    x = torch.randn(8, 32, device=DEVICE)
    assert_same(gpu.quantize(x, ROWS, None, 4.0), reference.quantize(x, ROWS, None, 4.0))


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)], ids=str)
def test_empty_operands_have_the_references_shapes(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, device=DEVICE)
    for q, expected in zip(gpu.quantize_both(x, ROWS, ROWS), (x, x.t()), strict=True):
        assert_same(q, reference.quantize(expected, ROWS))
