"""Test that groups quantized at once, without reading their sizes, have the bits of separate groups."""

import pytest
import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupedNoise, GroupedOperand, GroupOffsets
from quaver.torch.numerics.quantized import Quantized, decode_scales, spread
from quaver.torch.numerics.rounding import NO_NOISE
from tests.close import assert_bitwise
from tests.operands import SPECS, nasty

T = 70
SIZES = (5, 0, 40, 19)
DRAW = GroupedNoise(3, [11, 12, 13, 14], [0, 5, 6, 7])


def rows(k: int) -> Tensor:
    """Edge-case rows of very different magnitudes; rows after the last group are NaN."""
    x = torch.randn(T, k, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, T)[:, None]
    hard = nasty((8, k))
    for at, name in ((0, "subnormal"), (20, "huge"), (45, "infinity"), (55, "NaN")):
        x[at : at + 5] = torch.from_numpy(hard[name][:5])
    x[3], x[64:] = 0.0, torch.nan
    return x


def offsets() -> GroupOffsets:
    return GroupOffsets(torch.tensor(SIZES, dtype=torch.int32).cumsum(0, dtype=torch.int32), T)


def alone(x: Tensor, spec: QuantSpec, group: int, for_wgrad: bool, factors: Tensor | None) -> Quantized:
    noise = NO_NOISE if spec.rounding == "nearest" else DRAW.of(group)
    factor = None if factors is None else factors[group]
    return reference.quantize((x.t() if for_wgrad else x).contiguous(), spec, None, factor, noise)


def part_of(laid: GroupedOperand, places: GroupOffsets, group: int, q: Quantized) -> tuple[Tensor, Tensor]:
    """Values and decode scales [rows, k] of one group."""
    values, (start, end) = grouped.values(laid), places.bounds()[group]
    if laid.for_wgrad:
        first = int(laid.slots.ends[group] - laid.slots.filled[group])
        stop = first + q.shape[1]
        scales = grouped.slot_scales(laid)[first:stop].t()
        values, along = values[:, first:stop], (laid.spec.block[0], 1)
    else:
        stored, factor = grouped.row_scales(laid, places)
        scales, values = decode_scales(stored, laid.spec, factor)[start:end], values[start:end]
        along = (1, laid.spec.block[1])
    return values, spread(scales, along, q.shape).expand(q.shape)


@pytest.mark.parametrize("for_wgrad", [False, True], ids=["rows", "for_wgrad"])
@pytest.mark.parametrize("name", SPECS)
def test_the_operand_of_a_group_depends_on_its_rows_alone(name: str, for_wgrad: bool) -> None:
    spec, places = SPECS[name], offsets()
    delayed = spec.per_tensor and spec.scale in ("fp32", "power_of_two")
    for k in (40, 33):
        for factors in (None, torch.tensor([0.0, 2.0, 4.0, 0.5])) if delayed else (None,):
            x = rows(k)
            laid = grouped.quantize(x, spec, places, for_wgrad, factors, DRAW)
            for group, (start, end) in enumerate(places.bounds()):
                if start == end:
                    continue
                q = alone(x[start:end], spec, group, for_wgrad, factors)
                values, scales = part_of(laid, places, group, q)
                assert_bitwise(values[:, : q.shape[1]].contiguous(), q.values().contiguous())
                expected = spread(q.scales(), spec.block, q.shape).expand(q.shape)
                assert_bitwise(scales.contiguous(), expected.contiguous())
                if spec.per_tensor and spec.scale != "unit":
                    assert laid.amax is not None and isinstance(q.amax, Tensor)
                    assert_bitwise(laid.amax[group], q.amax.reshape(()))


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.transposable])
def test_transposed_groups_have_the_codes_and_scales_of_their_rows(name: str) -> None:
    spec, places, x = SPECS[name], offsets(), rows(40)
    transposed = grouped.transposed(grouped.quantize(x, spec, places, False, None, DRAW), places)
    for group, (start, end) in enumerate(places.bounds()):
        if start < end:
            q = alone(x[start:end], spec, group, False, None).T
            values, scales = part_of(transposed, places, group, q)
            assert_bitwise(values.contiguous(), q.values().contiguous())
            expected = spread(q.scales(), spec.block, q.shape).expand(q.shape)
            assert_bitwise(scales.contiguous(), expected.contiguous())


@pytest.mark.parametrize("sizes", [(0, 0, 0), (70, 0, 0), (0, 0, 70), (1, 1, 1)], ids=str)
def test_slots_begin_at_multiples_for_any_group_sizes(sizes: tuple[int, ...]) -> None:
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = torch.arange(1.0, 71.0).unsqueeze(1)
    for multiple in (1, 16, 128):
        slots = GroupOffsets(ends, 70).slots(multiple)
        taken, start = slots.take(x), 0
        assert taken.shape == (slots.count, 1) and int(slots.ends[-1]) <= slots.count
        for group, size in enumerate(sizes):
            first = int(slots.ends[group] - slots.filled[group])
            assert first % multiple == 0 and torch.equal(taken[first : first + size], x[start : start + size])
            assert not taken[first + size : int(slots.ends[group])].any()
            start += size
        assert int(taken.count_nonzero()) == sum(sizes)
