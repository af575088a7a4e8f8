"""MXFP8 kernels: along rows, down columns and both from one read have the reference's codes and swizzled scales."""

import pytest
import torch
from torch import Tensor

from quaver import E4M3, E5M2, QuantSpec
from quaver.torch.backends.gpu import block_scaled, tensorwise
from quaver.torch.backends.gpu.block_scaled import by_exponents
from quaver.torch.backends.gpu.quantize_launch import RequestedOperands
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from tests.kernels.compare import DEVICE, assert_same
from tests.operands import every_nth, nasty
from tests.pairs import alternating

LINES = [QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E5M2, (1, 32), "e8m0")]
SQUARES = [QuantSpec(E4M3, (32, 32), "e8m0"), QuantSpec(E5M2, (32, 32), "e8m0")]
NAMES = ["normal", "wide", "negative zeros", "NaN", "-infinity", "a subnormal"]
SHAPES = [(128, 128), (5, 7), (130, 65)]


def operands(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, at: int = 0, of: int = 1) -> list[Tensor]:
    """All of NAMES, or every `of`-th one."""
    hard = {name: x for name, x in nasty(shape).items() if name in NAMES}
    return [torch.from_numpy(x).to(DEVICE).to(dtype) for x in every_nth(hard, at, of).values()]


def assert_as_stored(q: Quantized | None, expected: Quantized) -> None:
    """The same operand, its rows and its tiles of scales filled with zeros."""
    assert q is not None
    assert_same(q, expected)
    stride = q.data.stride(0)
    assert stride % 16 == 0
    assert not q.data.as_strided((q.shape[0], stride), (stride, 1))[:, q.shape[1] :].view(torch.uint8).any()
    rows, blocks = q.shape[0], -(-q.shape[1] // 32)
    assert isinstance(q.scale, Tensor)
    assert q.scale.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    used = q.scale.view(-1, -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, -(-blocks // 4) * 4)
    assert not used[rows:].any()
    assert not used[:, blocks:].any()


@pytest.mark.parametrize(("spec", "shape"), alternating(LINES + SQUARES, SHAPES, [LINES[0], SQUARES[0]]), ids=str)
def test_one_read_gives_the_reference_in_both_directions(spec: QuantSpec, shape: tuple[int, int]) -> None:
    for x in operands(shape, at=(LINES + SQUARES).index(spec) + SHAPES.index(shape), of=3):
        q, transposed = by_exponents(x, spec, spec)
        assert_as_stored(q, reference.quantize(x, spec))
        assert_as_stored(transposed, reference.quantize(x.t(), spec))


@pytest.mark.parametrize(("spec", "shape"), alternating([LINES[0], SQUARES[0]], SHAPES, LINES), ids=str)
def test_one_direction_alone_gives_the_reference(spec: QuantSpec, shape: tuple[int, int]) -> None:
    for x in operands(shape, torch.float32, SHAPES.index(shape) + (spec in LINES), 2):
        q, nothing = by_exponents(x, spec, None)
        assert nothing is None
        assert_as_stored(q, reference.quantize(x, spec))
        none, transposed = by_exponents(x, None, spec)
        assert none is None
        assert_as_stored(transposed, reference.quantize(x.t(), spec))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_squares_of_both_directions_take_two_launches_with_triton_3_7_from_blackwell_on(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_scaled.triton, "__version__", "3.7.1")
    for arch, spec, names in (
        (90, SQUARES[0], ["mxfp8_columns"]),
        (100, LINES[0], ["mxfp8_columns"]),
        (100, SQUARES[0], ["mxfp8_rows", "mxfp8_columns"]),
    ):
        monkeypatch.setattr(block_scaled, "architecture", lambda _, arch=arch: arch)
        way = block_scaled._mx_launches(torch.empty(shape, device=DEVICE), spec, spec, RequestedOperands())
        assert [one.kernel.fn.__name__ for one in way.launches(None)] == names
    monkeypatch.setattr(tensorwise._quantizations, "plans", {})
    for x in operands(shape, at=SHAPES.index(shape), of=3):
        q, transposed = by_exponents(x, SQUARES[0], SQUARES[0])
        assert_as_stored(q, reference.quantize(x, SQUARES[0]))
        assert_as_stored(transposed, reference.quantize(x.t(), SQUARES[0]))


def test_float16_inputs_and_given_amaxes() -> None:
    for x in operands((33, 40), torch.float16):
        assert_as_stored(by_exponents(x, LINES[0], None)[0], reference.quantize(x, LINES[0]))
    x = operands((64, 64))[0]
    amax = torch.full((64, 2), 3.0, device=DEVICE)
    q, transposed = by_exponents(x, LINES[0], None, amax)
    assert q is not None
    assert transposed is None
    assert_same(q, reference.quantize(x, LINES[0], amax))


@pytest.mark.parametrize("spec", LINES, ids=str)
def test_every_exponent_of_an_amax_has_the_references_scale(spec: QuantSpec) -> None:
    """Blocks whose amaxes are all powers of two and their neighbours: where the factor's bounds and roundings are."""
    powers = (torch.arange(255, dtype=torch.int32) << 23).view(torch.float32)
    amax_values = torch.cat([powers, powers.nextafter(torch.tensor(torch.inf)), powers * 1.75, powers * 1.7500001])
    x = torch.zeros(len(amax_values), 32, device=DEVICE)
    x[:, 5] = amax_values.to(DEVICE)
    x[:, 7] = -amax_values.to(DEVICE) / 3
    assert_as_stored(by_exponents(x, spec, None)[0], reference.quantize(x, spec))


def test_rows_beyond_32_bit_offsets_are_read() -> None:
    """Offsets beyond 2**31 within a program; memory that nobody touches costs nothing."""
    stride = 2**28 + 32
    storage = torch.UntypedStorage((8 * stride + 32) * 2, device=DEVICE)
    x = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(storage, 0, (9, 32), (stride, 1))
    x.copy_(torch.arange(288.0).view(9, 32))
    for q, transposed in (by_exponents(x, LINES[0], None), by_exponents(x, LINES[0], LINES[0])):
        assert_as_stored(q, reference.quantize(x, LINES[0]))
        if transposed is not None:
            assert_as_stored(transposed, reference.quantize(x.t(), LINES[0]))
