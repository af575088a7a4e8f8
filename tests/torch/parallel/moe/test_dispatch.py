"""Rows that ranks send each other as codes: the bits of one process that quantizes all of them and takes these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import quaver
import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized, pack
from quaver.torch.parallel.moe import dispatch
from quaver.torch.parallel.moe.dispatch import AllToAllSplits
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.traffic import Traffic

WIDE = 320
ROWS = QuantSpec(quaver.E5M2, (1, None))


def specs() -> list[QuantSpec]:
    """The input specs of recipes, and others: one scale per row, block or tensor, and two-level scales."""
    inputs = [recipes.get(name).fprop.a for name in recipes.RECIPES]
    rows = [each for each in inputs if each is not None and (each.per_tensor or each.block[0] == 1)]
    given = [replace(each, rounding="nearest", hadamard=False) for each in rows]
    return sorted({*given, ROWS, QuantSpec(quaver.E4M3, (1, 128), "fp32")}, key=str)


def matrices(ranks: int) -> list[list[list[int]]]:
    """Rows that rank i sends to rank j: uneven, empty, all from one rank, all to one rank, and none at all."""
    uneven = [[(3 * i + 5 * j + 1) % 7 for j in range(ranks)] for i in range(ranks)]
    has_all = [[4 * (i == 1) * (j + 1) for j in range(ranks)] for i in range(ranks)]
    gets_all = [[(i + 2) * (j == 0) for j in range(ranks)] for i in range(ranks)]
    return [uneven, has_all, gets_all, [[0] * ranks for _ in range(ranks)]]


def hard_values(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(seed))
    x *= torch.linspace(0.1, 30, max(rows, 1))[:rows, None]
    for row, value in enumerate((0.0, 1e-41, 1e30, -0.0)):
        if row < rows:
            x[row, 3::7] = value
    return x.to(dtype)


def rows_of_rank(counts: list[int], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


class Case:
    """One matrix of splits, with the indices of each rank's sent and received rows among all rows."""

    def __init__(self, matrix: list[list[int]], rank: int) -> None:
        ranks = len(matrix)
        self.sizes = [sum(row) for row in matrix]
        self.own = rows_of_rank(self.sizes, rank)
        place = torch.arange(sum(self.sizes))
        pieces = [
            [place[rows_of_rank(self.sizes, i)][rows_of_rank(matrix[i], j)] for j in range(ranks)] for i in range(ranks)
        ]
        #: Indices of the rows that each rank receives.
        self.received_by = [torch.cat([pieces[i][j] for i in range(ranks)]) for j in range(ranks)]
        self.received = self.received_by[rank]
        self.splits = AllToAllSplits.of(matrix[rank], self.sizes[rank])
        assert self.splits == AllToAllSplits(tuple(matrix[rank]), tuple(row[rank] for row in matrix))


def codes_equal_one_process(rank: int) -> None:
    for matrix in matrices(two_ranks.world()):
        case = Case(matrix, rank)
        for spec in specs():
            for spoilt in (False, True):
                x = hard_values(sum(case.sizes), 1)
                if spoilt and len(x):
                    x[-1, 5], x[len(x) // 2, 300] = torch.nan, -torch.inf
                expected = qt.quantize(x, spec) if len(x) else None
                q = dispatch.quantize_rows(x[case.own], spec)
                for given in (q, transposed(q)):
                    received = dispatch.exchange_operand(given, case.splits)()
                    label = f"{spec}, {matrix}, turned {given.transposed}"
                    assert received.shape == (len(case.received), WIDE), label
                    if expected is not None:
                        assert_bitwise(received.codes(), expected.codes()[case.received], label)
                        scales = expected.scales().expand(len(x), -1)[case.received]
                        assert_bitwise(received.scales().expand(len(case.received), -1), scales, label)


def transposed(q: Any) -> Any:
    """The same operand, stored transposed."""
    data = pack(q.codes().t()) if q.spec.format.packed else q.data.t().contiguous()
    scale = q.scale.t().contiguous() if isinstance(q.scale, Tensor) else q.scale
    return Quantized(data, scale, q.spec, q.shape, True, q.tensor_factor)


def gradients_return_through_dispatch(rank: int) -> None:
    """Send rows there and back, in codes or not: rows and gradients have the bits of one process."""
    wires: list[tuple[QuantSpec | None, QuantSpec | torch.dtype | None]]
    wires = [(spec, None) for spec in specs()]
    wires += [(None, None), (specs()[0], ROWS), (None, ROWS), (specs()[0], torch.float32), (ROWS, torch.bfloat16)]
    for number, matrix in enumerate(matrices(two_ranks.world())):
        case = Case(matrix, rank)
        for at, (spec, gradient_spec) in enumerate(wires):
            # Alternate between the dtypes.
            dtype = (torch.float32, torch.bfloat16)[(number + at) % 2]
            label = f"{spec}, {gradient_spec}, {dtype}, {matrix}"
            x, g = hard_values(sum(case.sizes), 2, dtype), hard_values(sum(case.sizes), 3, dtype)
            own = x[case.own].clone().requires_grad_()
            y = dispatch.all_to_all(own, case.splits, spec, gradients=gradient_spec)
            z = dispatch.all_to_all(y * 3, case.splits.back, spec, gradients=gradient_spec)
            z.backward(g[case.own])
            dispatched = quantized_round_trip(x, spec, dtype)
            assert_bitwise(y.detach(), dispatched[case.received], label)
            assert_bitwise(z.detach(), quantized_round_trip(dispatched * 3, spec, dtype)[case.own], label)
            back = quantized_round_trip(g, gradient_spec or dtype, dtype) * 3
            assert_bitwise(
                own.grad, quantized_round_trip(back, gradient_spec or dtype, dtype)[case.own], f"gradient of {label}"
            )


def quantized_round_trip(x: Tensor, by: QuantSpec | torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """Apply in one process what sending does to values: quantize and dequantize, or cast."""
    if isinstance(by, QuantSpec) and len(x):
        return qt.quantize(x, by).dequantize().to(dtype)
    return x.to(by).to(dtype) if isinstance(by, torch.dtype) else x


def bytes_on_the_wire(rank: int) -> None:
    """Bytes relative to bf16 at 1024 features: one collective per direction, and all-reduces of four bytes."""
    ranks, wide = two_ranks.world(), 1024
    splits = AllToAllSplits.even(8)
    x = torch.randn(8 * ranks, wide).bfloat16().requires_grad_()
    most = {"e4m3": 0.52, "e5m2": 0.52, "e3m2": 0.52, "e2m3": 0.52, "e2m1": 0.29}
    for spec in specs():
        with Traffic() as traffic:
            y = dispatch.all_to_all(x, splits, spec, gradients=spec)
        # Backward runs in another thread and sends through the same function.
        share = traffic.total("exchange") / (2 * x.numel())
        assert 0.25 <= share <= most[spec.format.name], f"{spec}: {share:.3f}"
        assert traffic.calls["exchange", torch.uint8] == 1, traffic.calls
        # An amax, and two numbers that check that all rows fit.
        assert traffic.total("reduce") <= 4 + 24
        y.sum().backward()
    with Traffic() as traffic:
        dispatch.all_to_all(x, splits)
    assert traffic.total("exchange") == 2 * x.numel()


def sizes_on_a_device_and_what_is_wrong(rank: int) -> None:
    ranks = two_ranks.world()
    sent = [rank + i for i in range(ranks)]
    for given in (sent, torch.tensor(sent), torch.tensor(sent, dtype=torch.int32)):
        splits = AllToAllSplits.of(given, sum(sent))
        assert splits.received == tuple(i + rank for i in range(ranks))
        assert splits.back.back == splits
    # All ranks raise if one of them has an error.
    for wrong, first in (
        ([2] * (ranks - 1) + [1], "do not add up"),
        ([-1] + [2] * (ranks - 1), "do not add up"),
        ([2] * (ranks + 1), "give one number for each rank"),
        (None, "is no sequence of numbers"),
        (["two"] * ranks, "is no sequence of numbers"),
    ):
        with pytest.raises(ValueError, match=first if rank == 0 else r"ranks \[0\] of the group passed numbers"):
            AllToAllSplits.of(wrong if rank == 0 else [2] * ranks, 2 * ranks)
    x, even = torch.randn(2 * ranks, 64), AllToAllSplits.even(2)
    with pytest.raises(ValueError, match="do not add up"):
        dispatch.all_to_all(x[1:], even)
    for spec, message in (
        (QuantSpec(quaver.E4M3, (128, 128)), "scales per row or one for all"),
        (QuantSpec(quaver.E4M3, (1, 32), rounding="stochastic"), "rounded to nearest"),
        (QuantSpec(quaver.E2M1, (1, 16), "two_level", hadamard=True), "a layer rotates its input itself"),
    ):
        for options in ({"spec": spec}, {"gradients": spec}):
            with pytest.raises(ValueError, match=message):
                dispatch.all_to_all(x, even, **options)
    with pytest.raises(ValueError, match="as a matrix of float32, bfloat16 or float16"):
        dispatch.all_to_all(x.double(), even)
    with pytest.raises(ValueError, match=r"not as torch\.float64"):
        dispatch.all_to_all(x, even, gradients=torch.float64)
    dist.barrier()


def invalid_rows_on_one_rank_raise_on_all(rank: int) -> None:
    """Each rank in turn has invalid rows: all ranks raise and name them, and the next exchange works."""
    ranks = two_ranks.world()
    x, even = torch.randn(2 * ranks, 64), AllToAllSplits.even(2)
    spec, other = specs()[0], QuantSpec(quaver.E4M3, (128, 128))
    wrong: list[tuple[str, Any]] = [
        ("do not add up", lambda spec: dispatch.all_to_all(x[1:], even, spec)),
        ("do not add up", lambda spec: dispatch.all_to_all(x[:0], even, spec)),
        ("as a matrix of float32", lambda spec: dispatch.all_to_all(x[None], even, spec)),
        ("as a matrix of float32", lambda spec: dispatch.all_to_all(x.double(), even, spec)),
        ("width 32", lambda spec: dispatch.all_to_all(x[:, :32].contiguous(), even, spec)),
        (r"dtype torch\.bfloat16", lambda spec: dispatch.all_to_all(x.bfloat16(), even, spec)),
        ("scales per row", lambda spec: dispatch.all_to_all(x, even, other)),
        ("torch.bfloat16", lambda spec: dispatch.all_to_all(x, even, spec, gradients=torch.bfloat16)),
    ]
    for failing_rank in range(ranks):
        for given in (None, spec):
            for message, call in wrong:
                with pytest.raises(ValueError, match=f"rank {failing_rank}: [^;]*{message}"):
                    call(given) if rank == failing_rank else dispatch.all_to_all(x, even, given)
                assert dispatch.all_to_all(x, even, given).shape == x.shape


CASES = [
    codes_equal_one_process,
    gradients_return_through_dispatch,
    bytes_on_the_wire,
    sizes_on_a_device_and_what_is_wrong,
    invalid_rows_on_one_rank_raise_on_all,
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.ranks
def test_dispatched_rows_equal_one_process(ranks: int, tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


if __name__ == "__main__":
    two_ranks.main(CASES)
