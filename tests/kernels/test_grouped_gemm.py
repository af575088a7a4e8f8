"""GEMMs of codes in groups agree with float64 on the dequantized operands of each group, on difficult values."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import QuantSpec
from quaver.torch.backends.gpu import grouped_gemm
from quaver.torch.numerics import grouped, reference
from quaver.torch.numerics.grouped import GroupOffsets
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_close
from tests.kernels.compare import DEVICE

ROWS = 150
#: Ends of groups: ragged with an empty one, all rows in one, one row more than a tile, and none.
ENDS = [(5, 5, 70, 150), (150, 150, 150, 150), (129, 130, 130, 140), (0, 0, 0, 0)]
ROW, BLOCK = (QuantSpec(E5M2, (1, None)), QuantSpec(E4M3, (1, None))), (QuantSpec(E4M3, (1, 128)),) * 2


def operand(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 4, rows)[:, None]
    x[rows // 2] = 0.0
    return x.to(DEVICE)


def per_group(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise((0, *ends)))


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(
    ("specs", "n", "k"), [(ROW, 48, 144), (ROW, 272, 32), (BLOCK, 128, 144), (BLOCK, 256, 256)], ids=str
)
def test_rows_are_multiplied_by_the_codes_of_their_group(
    specs: tuple[QuantSpec, QuantSpec], n: int, k: int, ends: tuple[int, ...]
) -> None:
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    x = operand(ROWS, k)
    x[1] = torch.nan
    a = grouped.quantize(x, specs[0], offsets, False)
    square = specs[1].block[1] is not None
    matrices = QuantSpec(E4M3, (128, 128)) if square else specs[1]
    b = reference.quantize(operand(4 * n, k), matrices)
    assert grouped_gemm.reason(a, b, offsets, n) == ""
    bias = operand(4, n)
    y = grouped_gemm.matmul(a, b, offsets, n, torch.float32, None)
    biased = grouped_gemm.matmul(a, b, offsets, n, torch.bfloat16, bias, True)
    values, w = grouped.dequantized(a, offsets).double(), b.dequantize().double()
    for group, (start, end) in enumerate(per_group(ends)):
        expected = values[start:end] @ w[group * n : (group + 1) * n].t()
        assert_close(f"group {group}", y[start:end], expected.float(), 1e-6)
        assert_close(f"group {group}, biased", biased[start:end], (expected + bias[group].double()).bfloat16(), 4e-3)
    assert not y[ends[-1] :].any() and not biased[ends[-1] :].any(), "rows of no group"


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(("specs", "m", "n"), [(ROW, 48, 144), (BLOCK, 144, 128)], ids=str)
def test_codes_are_summed_over_the_slots_of_their_group(
    specs: tuple[QuantSpec, QuantSpec], m: int, n: int, ends: tuple[int, ...]
) -> None:
    offsets = GroupOffsets(torch.tensor(ends, dtype=torch.int32, device=DEVICE), ROWS)
    x, w = operand(ROWS, m), operand(ROWS, n)
    a, b = (grouped.quantize(t, spec, offsets, True) for t, spec in zip((x, w), specs, strict=True))
    assert grouped_gemm.reason_sums(a, b) == ""
    y = grouped_gemm.sums(a, b, torch.float32)
    for group, (start, end) in enumerate(per_group(ends)):
        one, other = (reference.quantize(t[start:end].t(), s) for t, s in zip((x, w), specs, strict=True))
        expected = one.dequantize().double() @ other.dequantize().double().t()
        assert_close(f"group {group}", y[group], expected.float(), 1e-6)


def test_operands_without_a_kernel_are_refused() -> None:
    offsets = GroupOffsets(torch.tensor([16, 32], dtype=torch.int32, device=DEVICE), 32)
    rows, squares = QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3, (128, 128))
    a = grouped.quantize(operand(32, 128), rows, offsets, False)
    b: Quantized = reference.quantize(operand(2 * 48, 128), squares)
    assert "48 columns" in grouped_gemm.reason(a, b, offsets, 48)
    assert "no kernel" in grouped_gemm.reason(a, reference.quantize(operand(96, 128), ROW[1]), offsets, 48)
    fp32 = grouped.quantize(operand(32, 128), QuantSpec(E4M3, (1, 128), "fp32"), offsets, True)
    assert "no kernel" in grouped_gemm.reason_sums(fp32, fp32)


def test_zeros_stay_zeros_whatever_their_scales() -> None:
    offsets = GroupOffsets(torch.tensor([16, 32], dtype=torch.int32, device=DEVICE), 32)
    x, w = torch.zeros(32, 128, device=DEVICE), torch.zeros(2 * 128, 128, device=DEVICE)
    x[:, 0], w[:, 1] = 3e38, 3e38
    a = grouped.quantize(x, BLOCK[0], offsets, False)
    y = grouped_gemm.matmul(a, reference.quantize(w, QuantSpec(E4M3, (128, 128))), offsets, 128, torch.float32, None)
    assert not y.any()
