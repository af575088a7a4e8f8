"""Grouped products by one kernel each agree with plain torch, group by group, on difficult values."""

import pytest
import torch
from torch import Tensor

from quaver.torch.backends.gpu import emulation
from tests.close import assert_close
from tests.kernels.compare import DEVICE

#: Ends of groups over 150 rows: ragged, empty ones, all in one, one row more than a block, rows outside of groups.
ENDS = [(5, 5, 70, 150), (150, 150, 150, 150), (65, 66, 66, 90), (0, 0, 0, 0)]


def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 64), (40, 33)])
def test_rows_are_multiplied_by_the_matrix_of_their_group(ends: tuple[int, ...], n: int, k: int) -> None:
    dtype = torch.bfloat16 if n == 128 else torch.float32
    x, w, ends_tensor = (
        operand(150, k, dtype=dtype),
        operand(4 * n, k, dtype=dtype),
        torch.tensor(ends, dtype=torch.int32),
    )
    rows, columns, bias = (operand(*shape, dtype=torch.float32) for shape in ((150,), (4 * n,), (4, n)))
    x[5] = 0.0
    y = emulation.multiply(x, w, ends_tensor.to(DEVICE), n, torch.float32)
    scaled = emulation.multiply(x, w, ends_tensor.to(DEVICE), n, torch.float32, bias, rows, columns)
    start = 0
    for group, end in enumerate(ends):
        expected = x[start:end].double() @ w[group * n : (group + 1) * n].double().t()
        assert_close(f"group {group}", y[start:end], expected.float(), 1e-6)
        group_scale = columns[group * n : (group + 1) * n].double()
        expected = expected * rows[start:end, None].double() * group_scale + bias[group].double()
        assert_close(f"group {group}, scaled", scaled[start:end], expected.float(), 1e-6)
        start = end
    assert not y[start:].any() and not scaled[start:].any(), "rows of no group"


@pytest.mark.parametrize("ends", [(0, 64, 64, 192), (5, 5, 70, 150)], ids=str)
@pytest.mark.parametrize(("m", "n"), [(64, 128), (33, 40)])
def test_transposes_are_summed_over_the_slots_of_their_group(ends: tuple[int, ...], m: int, n: int) -> None:
    line = 64 if ends[-1] == 192 else 1
    x, w, ends_tensor = operand(m, 200), operand(n, 200), torch.tensor(ends, dtype=torch.int32).to(DEVICE)
    x[:, ends[-1] :] = torch.nan
    rows, columns = operand(4, m, dtype=torch.float32), operand(4, n, dtype=torch.float32)
    y = emulation.add_up(x, w, ends_tensor, line, torch.float32)
    scaled = emulation.add_up(x, w, ends_tensor, line, torch.bfloat16, rows, columns)
    start = 0
    for group, end in enumerate(ends):
        expected = x[:, start:end].double() @ w[:, start:end].double().t()
        assert_close(f"group {group}", y[group], expected.float(), 1e-6)
        expected = expected * rows[group, :, None].double() * columns[group].double()
        assert_close(f"group {group}, scaled", scaled[group], expected.bfloat16(), 4e-3)
        start = end


def test_a_number_that_is_not_finite_stays_in_its_group() -> None:
    x, w = operand(40, 64), operand(2 * 32, 64)
    x[3, 5], w[40, 2] = torch.nan, torch.inf
    ends = torch.tensor([10, 30], dtype=torch.int32).to(DEVICE)
    y = emulation.multiply(x, w, ends, 32, torch.float32)
    bad = ~y.isfinite()
    assert bad[3].all() and bad[10:30, 8].all() and int(bad.sum()) == 32 + 20
    sums = emulation.add_up(x.t().contiguous(), operand(40, 32).t().contiguous(), ends, 1, torch.float32)
    assert (~sums[0, 5].isfinite()).all() and int((~sums.isfinite()).sum()) == 32
