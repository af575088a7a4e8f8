"""Where the rows of one call of experts go, and how they travel: there inside of the first product, back while others
compute.

    tokens [T, H] ─ by expert, and so by rank ─ all-to-all ─ by expert of this rank ─ products ─ all-to-all ─ Σ

Rows arrive by the rank that they come from, those of each rank by expert and token. Laid out by expert again they lie
as in one process that has the tokens of all ranks one after the other: each expert's GEMMs are that process's, bit for
bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.core.spec import QuantSpec
from quaver.torch.blocks.experts.permutation import combined, order, take, take_quantized
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.parallel.quantized.dispatch import Splits, exchange_operand, exchange_rows, quantize_rows
from quaver.torch.parallel.traffic import during
from quaver.torch.parallel.wire import Pending

#: How something travels: by codes of a spec, or as numbers of a dtype.
Way = QuantSpec | torch.dtype


@dataclass(frozen=True, eq=False)
class Journey:
    """Of one call: what this rank sends, and how what comes lies."""

    group: Any
    splits: Splits
    #: Choices of each token.
    k: int
    #: int64 [rows sent]: the choice that each is of, by expert.
    sources: Tensor
    #: int64 [T k]: of each choice its row among those that are sent, -1 if it was dropped.
    places: Tensor
    #: int64 [rows laid out]: by expert of this rank, which of the rows that came each is, -1 for padding.
    laid: Tensor
    #: int64 [rows that came]: where each lies among those.
    back: Tensor
    #: int32 [experts of this rank]: where each one's rows end.
    offsets: Tensor

    @staticmethod
    def of(indices: Tensor, experts: int, pad: int, capacity: int | None, group: Any) -> "Journey":
        """Settle it: ranks tell each other how many rows each expert gets, and the host waits for the numbers.

        Args:
            indices: [T, k], of all experts; experts: how many there are, those of rank 0 first.
            pad, capacity: as `permute` takes them, the capacity of this rank's tokens.
        """
        ranks, k = dist.get_world_size(group), indices.shape[1]
        offsets, places, sources = order(indices, experts, 1, capacity)
        sent = torch.diff(offsets, prepend=offsets.new_zeros(1)).to(torch.int64)
        came = torch.empty_like(sent)
        with during("control", "exchange", sent, group):
            dist.all_to_all_single(came, sent, group=group)
        numbers = torch.stack([sent, came]).tolist()
        own = experts // ranks
        to, given = (tuple(sum(row[rank * own : (rank + 1) * own]) for rank in range(ranks)) for row in numbers)
        # Of which expert here each row is that comes: ranks one after the other, each by expert.
        each = torch.arange(own, dtype=torch.int64, device=indices.device).repeat(ranks)
        of = each.repeat_interleave(came, output_size=sum(given))
        ends, back, laid = order(of.unsqueeze(1), own, pad)
        return Journey(group, Splits(to, given), k, sources[: sum(to)], places, laid, back, ends)


def begin(rows: Tensor, way: Way, splits: Splits, group: Any) -> Pending:
    """Begin to send rows; what waits for those that come gives them as numbers."""
    if not isinstance(way, QuantSpec):
        return exchange_rows(rows.to(way), splits, group)
    finish = exchange_operand(quantize_rows(rows, way, group), splits, group)
    return lambda: finish().dequantize()


@dataclass(frozen=True, eq=False)
class Arriving:
    """Tokens of all ranks that go to experts of this one, as `quaver.torch.linear.grouped.rows.Rows`.

    Where they travel by the spec of the recipe's input they are multiplied as the codes that came.
    """

    journey: Journey
    dispatch: Way
    gradients: Way
    remakes: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        (tokens,) = x
        assert tokens is not None
        trip = self.journey
        if not isinstance(self.dispatch, QuantSpec):
            came = begin(take(tokens, trip.sources, trip.k), self.dispatch, trip.splits, trip.group)()
            return take(came.to(tokens.dtype), trip.laid, 1), ()
        # Quantized once for all experts of a token.
        q = take_quantized(quantize_rows(tokens, self.dispatch, trip.group), trip.sources, trip.k)
        rows = take_quantized(exchange_operand(q, trip.splits, trip.group)(), trip.laid, 1)
        return rows if self.dispatch == spec else rows.dequantize().to(tokens.dtype), ()

    def remake(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("rows that came are kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        # None came in high precision.
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        trip = self.journey
        back = begin(_taken(g, trip.back), self.gradients, trip.splits.back, trip.group)().to(g.dtype)
        return (combined(back, trip.places, trip.k, None) if needs[0] else None,)


class Box:
    """What is on its way between two functions of one call."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: Pending | None = None

    def opened(self) -> Any:
        """What came; it is waited for once."""
        rows, self.rows = self.rows, None
        assert rows is not None
        return rows()


def sent_back(
    rows: Tensor, journey: Journey, combine: Way, gradients: Way, meanwhile: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Rows as experts give them, on the ranks that sent them, in the order in which they went; and what was computed
    while they travelled, as its gradient will be."""
    box = Box()
    ticket = _Send.apply(rows, journey, combine, gradients, box)
    other = None if meanwhile is None else meanwhile()
    came: Tensor = _Receive.apply(ticket, journey, gradients, box)
    return came, other


class _Send(torch.autograd.Function):
    """Begins to send rows, and waits for their gradients; what it gives stands for what comes, and holds nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey, combine: Way, gradients: Way, box: Box) -> Tensor:
        ctx.facts = journey, box, rows.dtype
        pending = begin(_taken(rows, journey.back), combine, journey.splits.back, journey.group)
        box.rows = lambda: pending().to(rows.dtype)
        return _standing_for((sum(journey.splits.sent), rows.shape[1]), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        journey, box, dtype = ctx.facts
        came = box.opened().to(dtype)
        # Rows of padding went nowhere.
        return take(came, journey.laid, 1), None, None, None, None


class _Receive(torch.autograd.Function):
    """Waits for what comes, and begins to send its gradients."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, journey: Journey, gradients: Way, box: Box) -> Tensor:
        ctx.facts = journey, gradients, box
        rows: Tensor = box.opened()
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        journey, gradients, box = ctx.facts
        box.rows = begin(g, gradients, journey.splits, journey.group)
        return _standing_for(g.shape, g), None, None, None


def _standing_for(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of a shape that takes no memory."""
    return like.new_zeros(1).expand(*shape)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    return x.index_select(0, at) if x.shape[0] else x.new_zeros((0, x.shape[1]))
