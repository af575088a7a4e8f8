"""Rows that go to other ranks, in parts of unequal length, as codes with their scales: the wire of expert parallelism.

Tokens that lie by the rank of their expert are dispatched by one all-to-all, and combined by another one the other way.
Quantizing a row commutes with moving it, so what arrives has the bits of one process that quantizes all rows and then
takes these. Codes and scales of a row travel together, as bytes; no collective adds any.

Source: torch.distributed.all_to_all_single; DeepSeek-V3 (arXiv:2412.19437, section 3.3.3) dispatches in FP8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from quaver.recipes.spec import QuantSpec
from quaver.torch.nn.moe.permutation import combined, order, take, take_quantized
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import magnitude_bits
from quaver.torch.operations.functional import quantize
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel.comm import Pending, agree, awaited, during
from quaver.torch.state.history.sync import check_agreement

# ---- dispatch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllToAllSplits:
    """How many rows go to each rank of a group and come from each, on the host, where all_to_all_single wants them.

    Rows lie by the rank that they go to, and arrive by the rank that they come from. `of` asks the ranks; made by hand
    it must be what they would say, which is not checked.
    """

    #: A number for each rank.
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> "AllToAllSplits":
        """The same rows the other way."""
        return AllToAllSplits(self.received, self.sent)

    @staticmethod
    def of(sent: Sequence[int] | Tensor, rows: int, group: Any = None) -> "AllToAllSplits":
        """What each rank gets, of what each says that it sends; all ranks call it.

        Args:
            sent: rows for each rank: numbers, or integers on any device, which are exchanged there and read once.
            rows: how many there are.
        Raises:
            ValueError: on all ranks, if one of them has numbers that are not of its rows.
        """
        ranks = dist.get_world_size(group)
        why = ""
        try:
            if isinstance(sent, Tensor):
                own = sent.detach().to(torch.int64)
            else:
                own = torch.tensor(list(sent), dtype=torch.int64, device=_device(group))
        except (TypeError, ValueError, RuntimeError):
            # The other ranks would wait for this one.
            own, why = torch.empty(0, dtype=torch.int64, device=_device(group)), f"{sent!r} is no sequence of numbers"
        if own.shape != (ranks,):
            why = why or f"{tuple(own.shape)} is the shape of their numbers"
            why = f"{ranks} ranks get rows, and {why}: give one for each rank"
            own = torch.full((ranks,), -1, dtype=torch.int64, device=own.device)
        # What is wrong on one rank all of them learn, in the place of a number.
        own = torch.where((own.min() < 0) | (own.sum() != rows), -1, own)
        others = torch.empty_like(own)
        own = own.contiguous()
        with during("control", "exchange", own, group):
            dist.all_to_all_single(others, own, group=group)
        (to, given) = torch.stack([own, others]).tolist()
        if min(to) < 0:
            raise ValueError(
                why or f"{sent} rows for each rank are not the {rows} rows that there are: they must add up"
            )
        if min(given) < 0:
            wrong = [rank for rank, number in enumerate(given) if number < 0]
            raise ValueError(f"ranks {wrong} of the group sent other rows than they have: see what they say")
        return AllToAllSplits(tuple(to), tuple(given))

    @staticmethod
    def even(each: int, group: Any = None) -> "AllToAllSplits":
        """As many rows for each rank and from each, of a capacity that is known: no rank is asked, and no GPU read."""
        return AllToAllSplits(*[(each,) * dist.get_world_size(group)] * 2)


def _device(group: Any) -> torch.device:
    """Where a group's collectives take numbers of the host."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def quantize_rows(x: Tensor, spec: QuantSpec, group: Any = None) -> Quantized:
    """Quantize this rank's rows as one process would quantize those of all ranks.

    Ranks agree on one amax, by one all-reduce of four bytes, where a scale is of the whole operand: per tensor and
    two-level. Rows and blocks of a row need nothing.

    Args:
        x: [rows, k], float32, bfloat16 or float16; no rows, too.
        spec: blocks of one row, or one scale for all; rounded to nearest.
    Raises:
        ValueError: another spec, one that rotates or that rounds at random.
    Exact: codes and scales of these rows in the operand that has all ranks' rows.
    """
    _refuse(why_no_spec(spec))
    amax: Tensor | None = None
    if spec.per_tensor or spec.two_level:
        bits = magnitude_bits(x.detach().to(torch.float32))
        top = bits.max().view(1) if bits.numel() else torch.zeros(1, dtype=torch.int32, device=x.device)
        amax = agree(top, group).view(torch.float32).view(1, 1)
    return quantize(x.detach().contiguous(), spec, amax)


def exchange_operand(q: Quantized, splits: AllToAllSplits, group: Any = None) -> Pending:
    """Begin to send rows of an operand to other ranks: codes and scales as bytes, in one all-to-all.

    A scale of the whole operand does not travel: ranks have agreed on it, as `quantize_rows` has them.

    Args:
        q: [rows, k], of blocks of one row or one scale for all; k is the same on all ranks.
        splits: of its rows.
    Returns:
        A function that waits and gives the rows that came, [rows, k]. Exact: no bit changes.
    Raises:
        ValueError: other blocks, or splits of other rows.
    """
    _refuse(why_no_spec(q.spec) or _why_no_rows(q.shape[0], splits))
    q = q.upright()
    sent = q.data.view(torch.uint8)
    codes = sent.shape[1]
    with_scales = q.spec.block[0] is not None
    if with_scales:
        assert isinstance(q.scale, Tensor)
        sent = torch.cat([sent, _bytes(q.scale)], 1)
    finish = exchange_rows(sent, splits, group)

    def wait() -> Quantized:
        rows = finish()
        scale = _numbers(rows[:, codes:], q.scale) if with_scales else q.scale
        data = rows[:, :codes].contiguous().view(q.data.dtype)
        return Quantized(data, scale, q.spec, (rows.shape[0], q.shape[1]), False, q.tensor_factor)

    return wait


def all_to_all(
    x: Tensor,
    splits: AllToAllSplits,
    spec: QuantSpec | None = None,
    *,
    gradients: QuantSpec | torch.dtype | None = None,
    group: Any = None,
) -> Tensor:
    """Rows of other ranks for rows of this one, in codes, and their gradients back the same way.

    `all_to_all(x, splits, spec)` dispatches tokens; `all_to_all(y, splits.back, spec)` returns their outputs.

    Args:
        x: [rows, k] that lie by the rank they go to: float32, bfloat16 or float16, one dtype and k on all ranks.
        splits: `AllToAllSplits.of`, or `AllToAllSplits.even` for a capacity.
        spec: how rows travel, as `quantize_rows` takes it; None sends them as they are.
        gradients: how their gradients travel: a spec, a dtype, or None for x's dtype.
        group: process group; None is the default one.
    Returns:
        [rows that came, k] in x's dtype: what the codes mean, rounded once to it. Of scales in powers of two, and of
        blocks of 16 with both levels in powers of two, bfloat16 and float32 hold that exactly, so that a layer whose
        recipe has this spec for its input multiplies the very values that came.
    Raises:
        ValueError: another spec, dtype or width, or splits of other rows; on a CPU on all ranks, where one of them has
            it or they differ. On a GPU that rank raises alone, since to ask the others would wait for the GPU.
    Exact: forward and gradient are those of one process that has all rows. A block with a NaN or an infinity arrives as
        NaN, as it is quantized anywhere.
    """
    why = _why_not(x, splits, spec, gradients)
    width = x.shape[1] if x.dim() == 2 else None
    backward = torch.is_grad_enabled() and x.requires_grad
    what = {"width": width, "dtype": x.dtype, "spec": spec, "gradients by": gradients, "gradient": backward}
    check_agreement("all_to_all", what, group, error=why)
    y: Tensor = _AllToAllFunction.apply(x, splits, spec, x.dtype if gradients is None else gradients, group)
    return y


class _AllToAllFunction(torch.autograd.Function):
    """Rows one way, gradients the other; nothing is kept between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: AllToAllSplits, spec: Any, gradients: Any, group: Any) -> Tensor:
        ctx.way = splits.back, gradients, group, x.dtype
        return _moved(x, splits, x.dtype if spec is None else spec, group).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        back, gradients, group, dtype = ctx.way
        return _moved(g, back, gradients, group).to(dtype), None, None, None, None


def _moved(x: Tensor, splits: AllToAllSplits, by: QuantSpec | torch.dtype, group: Any) -> Tensor:
    if isinstance(by, QuantSpec):
        q: Quantized = exchange_operand(quantize_rows(x, by, group), splits, group)()
        return q.dequantize()
    rows: Tensor = exchange_rows(x.to(by), splits, group)()
    return rows


def exchange_rows(x: Tensor, splits: AllToAllSplits, group: Any = None) -> Pending:
    """Begin to send rows to other ranks as they are; what is returned waits, and gives those that came."""
    x = x.contiguous()
    rows = x.new_empty((sum(splits.received), x.shape[1]))
    work = dist.all_to_all_single(rows, x, [*splits.received], [*splits.sent], group, async_op=True)
    # Of unequal parts each rank sends those that are not for itself.
    to_others = x[splits.sent[dist.get_rank(group)] :]
    wait = awaited("activations", "send", to_others, group, work)

    def finish() -> Tensor:
        wait()
        return rows

    return finish


def _why_not(
    x: Tensor, splits: AllToAllSplits, spec: QuantSpec | None, gradients: QuantSpec | torch.dtype | None
) -> str:
    """Why rows cannot travel so, or ""."""
    why = next((why for each in (spec, gradients) if isinstance(each, QuantSpec) and (why := why_no_spec(each))), "")
    if why:
        return why
    if x.dim() != 2 or x.dtype not in DTYPES:
        return f"rows travel as a matrix of float32, bfloat16 or float16, not {x.dtype} {list(x.shape)}"
    if isinstance(gradients, torch.dtype) and gradients not in DTYPES:
        return f"gradients travel as float32, bfloat16 or float16, or by a QuantSpec, not as {gradients}"
    return _why_no_rows(x.shape[0], splits)


def why_no_spec(spec: QuantSpec) -> str:
    """Why it is none to send rows by, or "": scales of several rows but not of all, noise, a rotation."""
    if not (spec.per_tensor or spec.block[0] == 1):
        return f"rows that go to several ranks have scales of their own or one for all, and {spec} has others"
    if spec.rounding != "nearest":
        return (
            f"rows travel rounded to nearest, since noise goes by a row's place in the whole: not by {spec}; use "
            'dataclasses.replace(spec, rounding="nearest")'
        )
    return f"rows travel as they are, and {spec} rotates them: a layer rotates what it gets" if spec.hadamard else ""


def _why_no_rows(rows: int, splits: AllToAllSplits) -> str:
    if sum(splits.sent) == rows:
        return ""
    return f"{splits.sent} rows for each rank are not the {rows} rows that there are: they must add up"


def _refuse(why: str) -> None:
    if why:
        raise ValueError(why)


def _bytes(scale: Tensor) -> Tensor:
    """Scales [rows, blocks] as uint8 [rows, bytes]."""
    return scale.reshape(-1).view(torch.uint8).view(scale.shape[0], scale.shape[1] * scale.element_size())


def _numbers(raw: Tensor, like: Any) -> Tensor:
    """What `_bytes` took."""
    # As one row of bytes: torch reads other numbers from no matrix that has one column of them.
    return raw.reshape(-1).clone().view(like.dtype).view(raw.shape[0], like.shape[1])


# ---- journey ---------------------------------------------------------------------------------------------
# Where the rows of one call of experts go, and how they travel: there inside of the first product, back while others
# compute.
#
#     tokens [T, H] ─ by expert, and so by rank ─ all-to-all ─ by expert of this rank ─ products ─ all-to-all ─ Σ
#
# Rows arrive by the rank that they come from, those of each rank by expert and token. Laid out by expert again they lie
# as in one process that has the tokens of all ranks one after the other: each expert's GEMMs are that process's, bit
# for bit.

#: How something travels: by codes of a spec, or as numbers of a dtype.
Way = QuantSpec | torch.dtype


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Of one call: what this rank sends, and how what comes lies."""

    group: Any
    splits: AllToAllSplits
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
    def of(indices: Tensor, experts: int, pad: int, capacity: int | None, group: Any) -> "DispatchPlan":
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
        return DispatchPlan(group, AllToAllSplits(to, given), k, sources[: sum(to)], places, laid, back, ends)


def begin(rows: Tensor, way: Way, splits: AllToAllSplits, group: Any) -> Pending:
    """Begin to send rows; what waits for those that come gives them as numbers."""
    if not isinstance(way, QuantSpec):
        return exchange_rows(rows.to(way), splits, group)
    finish = exchange_operand(quantize_rows(rows, way, group), splits, group)
    return lambda: finish().dequantize()


@dataclass(frozen=True, eq=False)
class DispatchedRows:
    """Tokens of all ranks that go to experts of this one, as `quaver.torch.linear.grouped.operands.RowInputOp`.

    Where they travel by the spec of the recipe's input they are multiplied as the codes that came.
    """

    dispatch_plan: DispatchPlan
    dispatch: Way
    gradients: Way
    recomputes_input: bool = False

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        (tokens,) = x
        assert tokens is not None
        trip = self.dispatch_plan
        if not isinstance(self.dispatch, QuantSpec):
            came = begin(take(tokens, trip.sources, trip.k), self.dispatch, trip.splits, trip.group)()
            return take(came.to(tokens.dtype), trip.laid, 1), ()
        # Quantized once for all experts of a token.
        q = take_quantized(quantize_rows(tokens, self.dispatch, trip.group), trip.sources, trip.k)
        rows = take_quantized(exchange_operand(q, trip.splits, trip.group)(), trip.laid, 1)
        return rows if self.dispatch == spec else rows.dequantize().to(tokens.dtype), ()

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        raise AssertionError("rows that came are kept")

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        # None came in high precision.
        return None

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        trip = self.dispatch_plan
        back = begin(_taken(g, trip.back), self.gradients, trip.splits.back, trip.group)().to(g.dtype)
        return (combined(back, trip.places, trip.k, None) if needs[0] else None,)


class DispatchState:
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
    rows: Tensor, dispatch_plan: DispatchPlan, combine: Way, gradients: Way, meanwhile: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Rows as experts give them, on the ranks that sent them, in the order in which they went; and what was computed
    while they travelled, as its gradient will be."""
    box = DispatchState()
    ticket = _Send.apply(rows, dispatch_plan, combine, gradients, box)
    other = None if meanwhile is None else meanwhile()
    came: Tensor = _Receive.apply(ticket, dispatch_plan, gradients, box)
    return came, other


class _Send(torch.autograd.Function):
    """Begins to send rows, and waits for their gradients; what it gives stands for what comes, and holds nothing."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, dispatch_plan: DispatchPlan, combine: Way, gradients: Way, box: DispatchState
    ) -> Tensor:
        ctx.facts = dispatch_plan, box, rows.dtype
        pending = begin(_taken(rows, dispatch_plan.back), combine, dispatch_plan.splits.back, dispatch_plan.group)
        box.rows = lambda: pending().to(rows.dtype)
        return _standing_for((sum(dispatch_plan.splits.sent), rows.shape[1]), rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        dispatch_plan, box, dtype = ctx.facts
        came = box.opened().to(dtype)
        # Rows of padding went nowhere.
        return take(came, dispatch_plan.laid, 1), None, None, None, None


class _Receive(torch.autograd.Function):
    """Waits for what comes, and begins to send its gradients."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, dispatch_plan: DispatchPlan, gradients: Way, box: DispatchState) -> Tensor:
        ctx.facts = dispatch_plan, gradients, box
        rows: Tensor = box.opened()
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        dispatch_plan, gradients, box = ctx.facts
        box.rows = begin(g, gradients, dispatch_plan.splits, dispatch_plan.group)
        return _standing_for(g.shape, g), None, None, None


def _standing_for(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of a shape that takes no memory."""
    return like.new_zeros(1).expand(*shape)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    return x.index_select(0, at) if x.shape[0] else x.new_zeros((0, x.shape[1]))
