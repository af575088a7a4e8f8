"""Rows of groups, quantized in one launch, have the codes and scales of each group alone, on difficult values."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quaver import recipes
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import emulation, grouped_block_scaled, grouped_quantize, grouped_values
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupedNoise, GroupOffsets
from quaver.torch.numerics.quantized import swizzle
from tests.close import assert_bitwise
from tests.kernels.compare import DEVICE

ROWS, BF16 = 150, torch.finfo(torch.bfloat16).max
#: Ends of groups: ragged with an empty one, all rows in one, one row more than a block, and none.
ENDS = [(5, 5, 70, 150), (150, 150, 150, 150), (129, 130, 130, 140), (0, 0, 0, 0)]
TENSOR, ROW = QuantSpec(E4M3), QuantSpec(E4M3, (1, None))
SPECS = [TENSOR, QuantSpec(E5M2), QuantSpec(E4M3, scale="fp32"), ROW, QuantSpec(E5M2, (1, None), "fp32")]


def difficult(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes, with a NaN row, infinities, zeros and subnormals."""
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-20, 20, (rows, 1), generator=generator))
    x[3], x[rows // 2, 5], x[rows - 1, k - 1] = torch.nan, torch.inf, -torch.inf
    x[2], x[8, :7], x[6, 2] = 0.0, 1e-40, 3e38
    return x.to(dtype).to(DEVICE)


def bounds(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise((0, *ends)))


def as_codes(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("k", "dtype"), [(144, torch.bfloat16), (16, torch.float32)])
def test_groups_have_the_codes_of_each_alone(
    spec: QuantSpec, ends: tuple[int, ...], k: int, dtype: torch.dtype
) -> None:
    x = difficult(ROWS, k, dtype)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    rows, columns = grouped_quantize.quantize(x, spec, spec, offsets)
    only_columns = grouped_quantize.quantize(x, None, spec, offsets)[1]
    assert rows is not None and columns is not None and only_columns is not None
    slot = 0
    for group, (start, end) in enumerate(bounds(ends)):
        slots = -(-(end - start) // 16) * 16
        if end > start:
            own = reference.quantize(x[start:end], spec)
            assert_bitwise(as_codes(rows.data[start:end]), as_codes(own.data))
            assert_bitwise(rows.scale[start:end], own.plain_scale().expand(end - start, 1))
            own = reference.quantize(x[start:end].t(), spec)
            padding = as_codes(own.data).new_zeros((k, slots - (end - start)))
            for one in (columns, only_columns):
                expected = torch.cat([as_codes(own.data), padding], 1)
                assert_bitwise(as_codes(one.data[:, slot : slot + slots].contiguous()), expected)
                assert_bitwise(one.scale[group], own.plain_scale().expand(k, 1)[:, 0])
            if spec.per_tensor:
                assert rows.amax is not None and own.amax is not None
                assert_bitwise(rows.amax[group], torch.as_tensor(own.amax).reshape(()))
        slot += slots


@pytest.mark.parametrize("spec", [TENSOR, QuantSpec(E5M2, scale="fp32")], ids=str)
def test_known_factors_are_used_unless_they_are_zero(spec: QuantSpec) -> None:
    x = difficult(ROWS, 32, torch.bfloat16)
    factors = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.25, 1.0], [0.0, 1.0]], device=DEVICE)[:, 0]
    offsets = GroupOffsets(torch.tensor(ENDS[0], dtype=torch.int32, device=DEVICE), ROWS)
    rows, _ = grouped_quantize.quantize(x, spec, spec, offsets, factors)
    assert rows is not None
    for group, (start, end) in enumerate(bounds(ENDS[0])):
        if end > start:
            own = reference.quantize(x[start:end], spec, None, factors[group] if factors[group] else None)
            assert_bitwise(as_codes(rows.data[start:end]), as_codes(own.data))
            assert_bitwise(rows.scale[start:end], own.plain_scale().expand(end - start, 1))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(48, 80), (144, 16)])
def test_weights_of_all_groups_have_the_codes_of_each(spec: QuantSpec, n: int, k: int) -> None:
    weight = difficult(3 * n, k, torch.bfloat16).view(3, n, k)
    fprop, dgrad = grouped_quantize.quantize_weights(weight, spec, spec)
    assert fprop is not None and dgrad is not None
    for group in range(3):
        for stacked, matrix in ((fprop, weight[group]), (dgrad, weight[group].t())):
            own, lines = reference.quantize(matrix, spec), matrix.shape[0]
            part = slice(group * lines, (group + 1) * lines)
            assert_bitwise(as_codes(stacked.data[part]), as_codes(own.data))
            assert_bitwise(stacked.plain_scale()[part], own.plain_scale().expand(lines, 1))


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_products_are_finished_in_place(ends: tuple[int, ...]) -> None:
    y = torch.full((ROWS, 40), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    y[: ends[-1]] = torch.randn(ends[-1], 40)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    bias, plain = torch.randn(4, 40, device=DEVICE), y.clone()
    grouped_quantize.finish_rows(plain, None, offsets)
    expected = y.clone()
    expected[ends[-1] :] = 0.0
    assert_bitwise(plain, expected)
    grouped_quantize.finish_rows(y, bias, offsets)
    for group, (start, end) in enumerate(bounds(ends)):
        expected[start:end] += bias[group].to(torch.bfloat16)
    assert_bitwise(y, expected)
    sums = torch.randn(4, 33, 40, device=DEVICE)
    has_rows = torch.tensor([end > start for start, end in bounds(ends)], device=DEVICE)
    expected = torch.where(has_rows.view(-1, 1, 1), sums, 0.0)
    assert_bitwise(grouped_quantize.finish_groups(sums, offsets), expected)
    slots = [-(-(end - start) // 32) * 32 for start, end in bounds(ends)]
    assert grouped_quantize.slot_ends(offsets, 32).tolist() == torch.tensor(slots).cumsum(0).tolist()


# ---- bf16 values of codes ----

MXFP6 = recipes.get("mxfp6").fprop.a
assert MXFP6 is not None
BLOCKS = [QuantSpec(E4M3, (1, 32), "e8m0"), QuantSpec(E4M3, (1, 128)), QuantSpec(MXFP6.format, (1, 16), "e8m0")]
NVFP4 = recipes.get("nvfp4")


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("spec", BLOCKS, ids=str)
def test_values_of_groups_are_those_of_each_alone(spec: QuantSpec, ends: tuple[int, ...]) -> None:
    x = difficult(ROWS, 144, torch.bfloat16)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    along, down, _ = grouped_values.values(x, spec, spec, offsets)
    _, _, saved = grouped_values.values(x, spec, spec, offsets, saves_codes=True)
    assert along is not None and down is not None and saved is not None
    shapes, dtypes = grouped_values.saved_shapes(spec, ROWS, 4, 144)
    assert [(tuple(t.shape), t.dtype) for t in saved] == list(zip(shapes, dtypes, strict=True))
    decoded = grouped_values.saved_values(*saved, spec)
    slot, unit = 0, grouped_values.slot_multiple(spec)
    for start, end in bounds(ends):
        if end > start:
            own_along, own_down, _ = emulation.values(x[start:end].contiguous(), spec, False)
            assert own_along is not None and own_down is not None
            assert_bitwise(along[start:end], own_along)
            for one in (down, decoded):
                assert_bitwise(one[slot : slot + end - start], own_down)
                padding = one[slot + end - start : slot + -(-(end - start) // unit) * unit]
                # A block that is not finite makes its padding NaN in both operands of a GEMM.
                assert not padding.nan_to_num(0.0).any()
        slot += -(-(end - start) // unit) * unit


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_two_level_values_of_groups_are_those_of_the_reference(operand: str, ends: tuple[int, ...]) -> None:
    x = difficult(ROWS, 96, torch.bfloat16)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    spec, other = {
        "input": (NVFP4.fprop.a, NVFP4.wgrad.b),
        "weight": (NVFP4.fprop.b, NVFP4.dgrad.b),
        "grad_output": (NVFP4.dgrad.a, NVFP4.wgrad.a),
    }[operand]
    assert spec is not None and other is not None and grouped_values.serves(spec, other)
    if operand == "weight":
        ends = tuple(end // 16 * 16 for end in ends)
        offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    draws = [GroupedNoise(7, [3 * g + t for g in range(4)], [g + t for g in range(4)]) for t in range(2)]
    noise = {"noise": draws[0], "other_noise": draws[1]} if operand == "grad_output" else {}
    along, down, _ = grouped_values.values(x, spec, other, offsets, **noise)  # type: ignore[arg-type]
    _, _, saved = grouped_values.values(x, spec, other, offsets, want_rows=False, saves_codes=True, **noise)  # type: ignore[arg-type]
    assert along is not None and (down is None) is (saved is None) is (operand == "weight")
    downs = [] if saved is None else [down, grouped_values.saved_values(*saved, other)]
    slot = 0
    for group, (start, end) in enumerate(bounds(ends)):
        if end > start:
            own = reference.quantize(x[start:end], spec, None, None, draws[0].of(group))
            assert_bitwise(along[start:end], own.dequantize().clamp(-BF16, BF16).to(torch.bfloat16))
            own = reference.quantize(x[start:end].t(), other, None, None, draws[1].of(group))
            expected = own.dequantize().clamp(-BF16, BF16).to(torch.bfloat16).t()
            for one in downs:
                assert one is not None
                assert_bitwise(one[slot : slot + expected.shape[0]].contiguous(), expected.contiguous())
        slot += -(-(end - start) // 16) * 16


# ---- codes in blocks of 128 ----


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("k", [144, 256])
def test_groups_in_blocks_have_the_codes_of_each_alone(k: int, ends: tuple[int, ...]) -> None:
    spec = QuantSpec(E4M3, (1, 128))
    x = difficult(ROWS, k, torch.bfloat16)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    rows, columns = grouped_quantize.quantize(x, spec, spec, offsets)
    assert rows is not None and columns is not None and rows.transpose is columns
    slot = 0
    for start, end in bounds(ends):
        slots = -(-(end - start) // 128) * 128
        if end > start:
            own = reference.quantize(x[start:end], spec)
            assert_bitwise(as_codes(rows.data[start:end]), as_codes(own.data))
            assert_bitwise(rows.scale[start:end], own.plain_scale())
            own = reference.quantize(x[start:end].t(), spec)
            padding = as_codes(own.data).new_zeros((k, slots - (end - start)))
            expected = torch.cat([as_codes(own.data), padding], 1)
            assert_bitwise(as_codes(columns.data[:, slot : slot + slots].contiguous()), expected)
            assert_bitwise(columns.scale[slot // 128 : (slot + slots) // 128], own.plain_scale().t())
        slot += slots


@pytest.mark.parametrize("both", [True, False])
def test_weights_in_squares_have_the_codes_of_each(both: bool) -> None:
    spec = QuantSpec(E4M3, (128, 128))
    weight = difficult(3 * 256, 128, torch.bfloat16).view(3, 256, 128)
    assert grouped_quantize.reason_weights(weight, spec, spec) == ""
    assert "multiples of 128" in grouped_quantize.reason_weights(weight[:, :144].contiguous(), spec, spec)
    fprop, dgrad = grouped_quantize.quantize_weights(weight, spec if both else None, spec)
    assert dgrad is not None and (fprop is not None) is both
    for group in range(3):
        for stacked, matrix in ((fprop, weight[group]), (dgrad, weight[group].t())):
            if stacked is not None:
                own, lines = reference.quantize(matrix, spec), matrix.shape[0]
                assert_bitwise(as_codes(stacked.data[group * lines : (group + 1) * lines]), as_codes(own.data))
                squares = slice(group * lines // 128, (group + 1) * lines // 128)
                assert_bitwise(stacked.plain_scale()[squares], own.plain_scale())


# ---- codes in narrow blocks, with swizzled scales ----

MXFP8 = QuantSpec(E4M3, (1, 32), "e8m0")
NARROW = {
    "mxfp8": (MXFP8, MXFP8),
    "input": (NVFP4.fprop.a, NVFP4.wgrad.b),
    "grad_output": (NVFP4.dgrad.a, NVFP4.wgrad.a),
}


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_groups_in_narrow_blocks_have_the_codes_of_each_alone(name: str, ends: tuple[int, ...]) -> None:
    spec, other = NARROW[name]
    assert spec is not None and other is not None
    x = difficult(ROWS, 160, torch.bfloat16)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    draws = [GroupedNoise(7, [3 * g + t for g in range(4)], [g + t for g in range(4)]) for t in range(2)]
    results = grouped_block_scaled.quantize(x, spec, other, offsets, None, *draws)
    alone = grouped_block_scaled.quantize(x, None, other, offsets, None, *draws)[1]
    reference_operands = grouped.quantize_both(x, spec, other, offsets, None, *draws)
    for ours, expected in zip((*results, alone), (*reference_operands, reference_operands[1]), strict=True):
        assert ours is not None and expected is not None and ours.swizzled
        plain = grouped.unswizzled(ours, offsets)
        assert plain.data.shape == expected.data.shape and plain.scale.shape == expected.scale.shape
        if ours.for_wgrad:
            used = int(ours.slots.ends[-1])
            codes, width = used // (2 if spec.two_level else 1), other.block[1]
            assert width is not None
            own, wanted = (as_codes(one.data)[:, :codes].contiguous() for one in (plain, expected))
            assert_bitwise(own, wanted)
            assert_bitwise(plain.scale[: used // width], expected.scale[: used // width])
        else:
            assert_bitwise(as_codes(plain.data)[: ends[-1]], as_codes(expected.data)[: ends[-1]])
            assert_bitwise(plain.scale[: ends[-1]], expected.scale[: ends[-1]])
        if expected.factor is not None:
            has_rows = torch.tensor([end > start for start, end in bounds(ends)])
            assert ours.factor is not None
            assert_bitwise(ours.factor[has_rows], expected.factor[has_rows])


@pytest.mark.parametrize(
    ("spec", "other"),
    [(MXFP8, MXFP8), (QuantSpec(E4M3, (32, 32), "e8m0"),) * 2, (NVFP4.fprop.b, NVFP4.dgrad.b)],
    ids=str,
)
def test_weights_in_narrow_blocks_have_the_codes_of_each(spec: QuantSpec, other: QuantSpec) -> None:
    weight = difficult(3 * 128, 256, torch.bfloat16).view(3, 128, 256)
    stacks = grouped_block_scaled.quantize_weights(weight, spec, other)
    for group in range(3):
        pairs = zip(stacks, (spec, other), (weight[group], weight[group].t()), strict=True)
        for stacked, one, matrix in pairs:
            assert stacked is not None
            own, lines = reference.quantize(matrix, one), matrix.shape[0]
            part = slice(group * lines, (group + 1) * lines)
            assert_bitwise(as_codes(stacked.data[part]), as_codes(own.data))
            height = one.block[0]
            assert height is not None
            blocks = slice(group * lines // height, (group + 1) * lines // height)
            assert_bitwise(stacked.plain_scale()[blocks], own.plain_scale())
            if own.tensor_factor is not None:
                assert stacked.tensor_factor is not None
                assert_bitwise(stacked.tensor_factor[part], own.tensor_factor.expand(lines, 1))


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_scales_of_rows_are_swizzled_per_group(ends: tuple[int, ...]) -> None:
    scale = torch.randint(256, (ROWS, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    swizzled, slot = grouped_block_scaled.swizzle_groups(scale, offsets), 0
    for start, end in bounds(ends):
        slots = -(-(end - start) // 128) * 128
        assert_bitwise(swizzled[slot : slot + slots].flatten(), swizzle(scale[start:end]))
        slot += slots
