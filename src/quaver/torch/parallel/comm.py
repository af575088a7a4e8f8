"""What goes between ranks: amaxes that are agreed, operands as bytes beside their scales, sums in float32.

Codes are never summed: torch's collectives add bytes without complaint, and the sum of two codes is no code of the sum.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations.functional import quantize

# ---- traffic ---------------------------------------------------------------------------------------------
# What a rank sends to others, counted where it is sent: bytes, calls, and the seconds that it waits, by kind.
#
# Off by default, and then free: a collective looks at one attribute, `active.all`. That is one for the process and not
# for the thread, because on a GPU backward runs in another thread than forward.

Kind = Literal["weights", "gradients", "activations", "keys_values", "amaxes", "control"]
#: What travels. "keys_values" is all that attention across ranks sends, "control" what ranks settle between them, such
#: as a mean loss.
KINDS: tuple[Kind, ...] = ("weights", "gradients", "activations", "keys_values", "amaxes", "control")
#: How it travels: an all-gather, a reduce-scatter, an all-reduce, an all-to-all, from one rank to another.
Way = Literal["gather", "scatter", "reduce", "exchange", "send"]


class SentBytes:
    """What this rank has sent to others while it was among `active.all`.

    Attributes:
        bytes: by kind; see `sent`.
        calls: collectives by kind.
        waiting: what it waits for now: a kind, or "" for nothing.
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.waiting = ""
        self._waited = 0.0
        self._events: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Of waiting for others and for what they send: the host's, and on a GPU the streams' that stood still."""
        for begin, end in self._events:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._waited


class _ActiveCounters:
    """Who counts now."""

    all: tuple[SentBytes, ...] = ()


active = _ActiveCounters()


def sent(way: Way, size: int, ranks: int) -> int:
    """Bytes that one of the ranks sends to others, by the algorithms that send fewest.

    Args:
        size: bytes of this rank's part for "gather", of what it gives for all else.
    """
    if way == "gather":
        return size * (ranks - 1)
    return size if way == "send" else (1 + (way == "reduce")) * size * (ranks - 1) // ranks


def during(
    kind: Kind, way: Way, x: Tensor, group: Any = None, by: tuple[SentBytes, ...] | None = None
) -> AbstractContextManager[Any]:
    """Count a collective that is waited for within the block.

    Args:
        x: as `sent` takes its size.
        group: process group; None is the default one.
        by: who counts; None is all who do now.
    """
    by = active.all if by is None else by
    if not by:
        return nullcontext()
    count(kind, way, x, group, by)
    return _WaitTimer(kind, x, by)


def awaited(kind: Kind, way: Way, x: Tensor, group: Any, work: Any) -> Callable[[], object]:
    """Count a collective that has begun; what waits for it is returned.

    Args:
        work: torch's, or several.
    """
    works = work if isinstance(work, list) else [work]

    def wait() -> None:
        for each in works:
            each.wait()

    by = active.all
    if not by:
        return wait
    count(kind, way, x, group, by)

    def timed() -> None:
        with _WaitTimer(kind, x, by):
            wait()

    return timed


def waiting(kind: Kind, x: Tensor) -> AbstractContextManager[Any]:
    """Note that this rank waits within the block for what others send, x."""
    return _WaitTimer(kind, x, active.all) if active.all else nullcontext()


def count(kind: Kind, way: Way, x: Tensor, group: Any, by: tuple[SentBytes, ...]) -> None:
    """Count a collective, and not how long it is waited for."""
    size = sent(way, x.numel() * x.element_size(), dist.get_world_size(group))
    for each in by:
        each.bytes[kind] += size
        each.calls[kind] += 1


class _WaitTimer:
    """While entered, this rank waits."""

    __slots__ = ("begun", "by", "event", "kind", "x")

    def __init__(self, kind: str, x: Tensor, by: tuple[SentBytes, ...]) -> None:
        self.kind, self.x, self.by = kind, x, by

    def __enter__(self) -> None:
        for each in self.by:
            each.waiting = self.kind
        self.event = _event() if self.x.is_cuda else None
        self.begun = time.perf_counter()

    def __exit__(self, failure: object, *_: object) -> None:
        seconds, end = time.perf_counter() - self.begun, _event() if self.x.is_cuda else None
        for each in self.by:
            if end is None:
                each._waited += seconds
            else:
                each._events.append((self.event, end))
            if failure is None:  # else it waits in vain, and is asked for what
                each.waiting = ""


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# ---- wire ------------------------------------------------------------------------------------------------

#: torch 2.13 has given them these names, and warns of the earlier ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: What waits for a collective and gives its result.
Pending = Callable[[], Any]


def agree(bits: Tensor, group: Any = None) -> Tensor:
    """The largest of every rank's amaxes, in place.

    Args:
        bits: those of float32 magnitudes, int32 of any shape that is the same on all ranks. As integers NaN is more
            than infinity, and that more than any number; a collective of floats may lose a NaN.
        group: process group; None is the default one.
    Raises:
        ValueError: other numbers than int32.
    Exact.
    """
    if bits.dtype is not torch.int32:
        raise ValueError(
            f"ranks agree on the bits of amaxes, int32, and these are {bits.dtype}: give x.abs().amax().float().view("
            "torch.int32), whose order is that of NaN, infinity and numbers"
        )
    with during("amaxes", "reduce", bits, group):
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits


def gather(x: Tensor, dim: int, group: Any = None, batches: int = 1, kind: Kind = "activations") -> Pending:
    """Begin to put the parts of a tensor together, which lie one rank after the other along a dimension.

    Args:
        x: this rank's part, as large as every other's.
        dim: the dimension that is in parts.
        batches: so many sequences follow one another along it, and each is in parts.
        kind: of what it is, for who counts what is sent.
    Returns:
        A function that waits and gives the whole, the same on all ranks. Exact: no bit changes.
    """
    ranks, part = dist.get_world_size(group), x.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]) if part.dim() else (ranks,))
    wait = awaited(kind, "gather", part, group, all_gather(whole, part, group, async_op=True))

    def finish() -> Tensor:
        wait()
        each = whole.view(ranks, *part.shape)
        if dim == 0 and batches == 1:
            return whole
        each = each.unflatten(dim + 1, (batches, part.shape[dim] // batches)).movedim(0, dim + 1)
        return each.flatten(dim, dim + 2)

    return finish


def gather_operand(q: Quantized, axis: int, group: Any = None, batches: int = 1) -> Pending:
    """Begin to put the parts of an operand together: codes as bytes, and beside them the scales.

    A scale that is of the whole operand, or of whole rows where k is in parts, does not travel: ranks have agreed on it
    before they quantized.

    Args:
        q: this rank's part [rows, k], as large as every other's, whole blocks of it.
        axis: 0 where rows are in parts, 1 where k is.
        batches: as `gather` takes them.
    Returns:
        A function that waits and gives the whole operand. Exact: the codes and scales of the whole.
    """
    q = q.plain()
    dim = axis ^ q.transposed
    codes = gather(q.data.view(torch.uint8), dim, group, batches)
    scales: Pending | None = None
    if q.spec.block[axis] is not None:
        assert isinstance(q.scale, Tensor)
        scales = gather(q.scale, dim, group, batches)

    def finish() -> Quantized:
        shape = [*q.shape]
        shape[axis] *= dist.get_world_size(group)
        data = codes().view(q.data.dtype)
        scale = q.scale if scales is None else scales()
        return Quantized(data, scale, q.spec, (shape[0], shape[1]), q.transposed, q.tensor_factor, q.amax)

    return finish


def sum_parts(x: Tensor, group: Any = None, kind: Kind = "activations") -> Pending:
    """Begin to sum every rank's x, float32 or float64, in place.

    Args:
        kind: of what it is, for who counts what is sent.
    Returns:
        A function that waits and gives the sum, the same on all ranks.
    Raises:
        ValueError: numbers of another dtype.
    """
    _summable(x)
    wait = awaited(kind, "reduce", x, group, dist.all_reduce(x, dist.ReduceOp.SUM, group, async_op=True))

    def finish() -> Tensor:
        wait()
        return x

    return finish


def scatter_sums(x: Tensor, group: Any = None, batches: int = 1) -> Pending:
    """Begin to sum every rank's x [batches × tokens, n], float32 or float64, for this rank's tokens of the sum.

    Args:
        batches: so many sequences follow one another in x, and of each every rank gets its part.
    Returns:
        A function that waits and gives [batches × tokens / ranks, n].
    Raises:
        ValueError: numbers of another dtype.
    """
    _summable(x)
    ranks = dist.get_world_size(group)
    if batches > 1:
        x = x.unflatten(0, (batches, ranks, -1)).movedim(1, 0)
    x = x.contiguous().view(-1, x.shape[-1])
    part = x.new_empty((x.shape[0] // ranks, x.shape[1]))
    work = reduce_scatter(part, x, dist.ReduceOp.SUM, group, async_op=True)
    wait = awaited("activations", "scatter", x, group, work)

    def finish() -> Tensor:
        wait()
        return part

    return finish


def unite(x: Tensor, group: Any = None, dim: int | None = None) -> Pending:
    """Begin to put an x together of whose elements each is there on one rank alone, and 0 (all bits) on the others.

    Bytes are compared, not added: every bit arrives, of NaN and of a zero's sign too.

    Args:
        dim: None gives every rank the whole; else each gets its part of this dimension, which ranks divide.
    Returns:
        A function that waits and gives the whole or the part.
    """
    if dim is None:
        whole = x.contiguous().view(-1).view(torch.uint8)
        everybody = dist.all_reduce(whole, dist.ReduceOp.MAX, group, async_op=True)
        wait_whole = awaited("activations", "reduce", whole, group, everybody)

        def finish_whole() -> Tensor:
            wait_whole()
            return whole.view(x.dtype).view(x.shape)

        return finish_whole
    ranks = dist.get_world_size(group)
    parts = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    work = reduce_scatter(
        own.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group, async_op=True
    )
    wait = awaited("activations", "scatter", parts, group, work)

    def finish() -> Tensor:
        wait()
        return own

    return finish


def _summable(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"ranks sum float32 or float64, and this is {x.dtype}: a collective adds codes as if they were numbers; "
            "convert or dequantize first"
        )


def scatter_quantized_sums(x: Tensor, spec: QuantSpec, group: Any = None) -> Pending:
    """Begin to sum every rank's x [ranks × n], quantized once by each, for this rank's part of the sum.

    Codes and scales of a rank's part travel to it as bytes, in one all-to-all, and are summed as float32 in the order
    of ranks: no collective adds codes. A part that is no whole number of blocks ends with zeros on the wire.

    Args:
        x: float32, bfloat16 or float16, flat; as long on all ranks.
        spec: blocks of one row, rounded to nearest.
        group: process group; None is the default one.
    Returns:
        A function that waits and gives the sum [n], float32. Exact: the float32 sum of what each rank's part
        dequantizes to. A block with a NaN or an infinity on any rank is NaN.
    Raises:
        ValueError: a spec of other blocks, or an x that ranks do not divide.
    """
    ranks = dist.get_world_size(group)
    if x.dim() != 1 or x.numel() % ranks:
        raise ValueError(f"{ranks} ranks sum a flat tensor in parts of one length, not {tuple(x.shape)}: pad it")
    part = x.numel() // ranks
    sent, layout = _as_bytes(x.view(ranks, part), spec)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    wait = awaited("gradients", "exchange", sent, group, work)

    def finish() -> Tensor:
        wait()
        parts = _from_bytes(received, layout)
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        return total[:part]

    return finish


def gather_quantized(x: Tensor, spec: QuantSpec, group: Any = None) -> Pending:
    """Begin to put every rank's x [n], quantized once, one after the other.

    Returns:
        A function that waits and gives [ranks × n], float32, the same bits on all ranks, the sender's own among them.
    Raises:
        ValueError: a spec of other blocks than `scatter_quantized_sums` takes.
    """
    sent, layout = _as_bytes(x.view(1, -1), spec)
    whole = gather(sent, 0, group, kind="gradients")

    def finish() -> Tensor:
        return _from_bytes(whole(), layout)[:, : x.numel()].reshape(-1)

    return finish


def check_gradient_spec(spec: Any) -> int:
    """The elements of a block of gradients. Raises: ValueError, of a spec in which they do not travel."""
    block = spec.block[1] if isinstance(spec, QuantSpec) else None
    if block is None or spec.block[0] != 1 or spec.rounding != "nearest" or spec.two_level or spec.hadamard:
        raise ValueError(
            f"gradients travel in blocks of one row, rounded to nearest, and this is {spec!r}: give a QuantSpec such "
            "as QuantSpec(quaver.E4M3, (1, 128))"
        )
    return block


#: Of rows as bytes: the spec, the columns, the dtype and bytes of a row's codes, and the dtype of its scales.
Layout = tuple[QuantSpec, int, torch.dtype, int, torch.dtype]


def _as_bytes(rows: Tensor, spec: QuantSpec) -> tuple[Tensor, Layout]:
    """Rows [m, n], quantized, as uint8 [m, bytes]: codes, and the scales after them."""
    block = check_gradient_spec(spec)
    columns = -(-rows.shape[1] // block) * block
    q = quantize(torch.nn.functional.pad(rows, (0, columns - rows.shape[1])).contiguous(), spec).plain()
    assert isinstance(q.scale, Tensor)
    codes, scales = q.data.contiguous().view(torch.uint8), q.scale.reshape(-1).view(torch.uint8)
    layout = spec, columns, q.data.dtype, codes.shape[1], q.scale.dtype
    return torch.cat([codes, scales.view(rows.shape[0], scales.numel() // rows.shape[0])], 1), layout


def _from_bytes(rows: Tensor, layout: Layout) -> Tensor:
    """What `_as_bytes` took, as far as it was kept: float32 [m, columns]."""
    spec, columns, dtype, size, of_scales = layout
    count = rows.shape[0]
    # As a row of bytes: torch reads other numbers from no matrix that has one column of them.
    scales = rows[:, size:].reshape(-1).clone().view(of_scales).view(count, -1)
    return Quantized(rows[:, :size].contiguous().view(dtype), scales, spec, (count, columns)).dequantize()
