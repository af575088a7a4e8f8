"""Two processes on gloo: what the ranks put together is the whole, bit for bit, and amaxes order as integers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import QuantSpec
from quaver.torch.parallel import comm
from tests import two_ranks
from tests.close import assert_bitwise
from tests.two_ranks import RANKS


def bits(x: Tensor) -> Tensor:
    return x.float().view(torch.int32) & 0x7FFFFFFF


def amaxes_order_as_integers(rank: int) -> None:
    hard = torch.tensor([[1.0, 2.0], [torch.inf, 1e38], [torch.nan, torch.inf], [0.0, 1e-40], [-3.0, 2.0], [0.0, 0.0]])
    own = hard[:, rank].abs()
    agreed = comm.all_reduce_amax(bits(own)).view(torch.float32)
    assert_bitwise(agreed, torch.tensor([2.0, torch.inf, torch.nan, 1e-40, 3.0, 0.0]))
    with pytest.raises(ValueError, match="amaxes as the bits of float32 in int32"):
        comm.all_reduce_amax(own)


def parts_of_tensors(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int32):
        for shape in ((8, 6), (0, 6), (8, 0)):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(50).abs().to(dtype)
            for dim in (0, 1):
                part = whole.chunk(RANKS, dim)[rank] if shape[dim] else whole
                assert_bitwise(comm.gather(part, dim)(), whole, f"{dtype} {shape} {dim}")
    sequences = torch.arange(3 * 8 * 5.0).view(3, 8, 5)
    part = sequences.chunk(RANKS, 1)[rank].reshape(-1, 5)
    assert_bitwise(comm.gather(part, 0, batches=3)(), sequences.view(-1, 5))
    assert_bitwise(comm.gather(part.t(), 1, batches=3)(), sequences.view(-1, 5).t().contiguous())
    assert_bitwise(comm.scatter_sums(sequences.view(-1, 5) * (1 + rank), batches=3)(), part * 3)
    assert_bitwise(comm.scatter_sums(sequences.view(-1, 5) * (1 + rank))(), sequences.view(-1, 5).chunk(2)[rank] * 3)
    assert_bitwise(comm.sum_parts(sequences * (1 + rank))(), sequences * 3)


def specs() -> list[QuantSpec]:
    """Specs of all recipes, rounded to nearest, since noise depends on the position in the unsharded operand."""
    operands = [spec for name in recipes.RECIPES for spec in recipes.get(name).operands().values() if spec is not None]
    return sorted({replace(spec, rounding="nearest") for spec in operands}, key=str)


def parts_of_operands(rank: int) -> None:
    """Shards of every spec, along rows or k, in both layouts, equal the unsharded operand when concatenated."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    x *= torch.linspace(0.1, 30, 256)[:, None]
    x[5, 7], x[200, 300] = torch.nan, -torch.inf
    for spec in specs():
        for axis in (0, 1):
            for transposed in (False, True):
                given = x.t().contiguous().t() if transposed else x
                whole = qt.quantize(given, spec)
                # The amax of blocks that span both ranks.
                amax = whole.amax if spec.block[axis] is None or spec.two_level else None
                q = qt.quantize(given.chunk(RANKS, axis)[rank], spec, amax)
                together = comm.gather_operand(q, axis)()
                label = f"{spec} axis {axis} turned {transposed}"
                assert together.shape == whole.shape, label
                assert_bitwise(together.codes(), whole.codes(), label)
                assert_bitwise(together.scales(), whole.scales(), label)


def codes_are_not_summed(rank: int) -> None:
    q = qt.quantize(torch.randn(8, 8), recipes.get("tensorwise").fprop.a)
    for codes in (q.data, q.data.view(torch.uint8), torch.randn(8, 8).bfloat16()):
        for add in (comm.sum_parts, comm.scatter_sums):
            with pytest.raises(ValueError, match="dequantize first"):
                add(codes)
    dist.barrier()


CASES = [amaxes_order_as_integers, parts_of_tensors, parts_of_operands, codes_are_not_summed]


@pytest.mark.ranks
def test_two_ranks_together_have_the_whole(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path)


if __name__ == "__main__":
    two_ranks.main(CASES)
