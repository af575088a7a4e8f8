"""Collectives for quantized operands, amaxes and float32 sums.

Codes are never summed. torch's collectives add bytes without complaint, and the sum of two codes is not the code of the
sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.functional import quantize
from quaver.torch.parallel.comm_counter import Kind, active, count, count_async, count_collective, waiting

#: torch 2.13 renamed these collectives and warns about the earlier names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: A function that waits for a started collective and returns its result.
Pending = Callable[[], Any]


def all_reduce_amax(bits: Tensor, group: Any = None) -> Tensor:
    """All-reduce amaxes in place to their maximum over all ranks.

    Args:
        bits: bit patterns of float32 magnitudes, int32, with the same shape on all ranks. Ordered as integers, NaN >
            infinity > finite; a max over floats may lose a NaN.
        group: process group; None is the default one.
    Raises:
        ValueError: bits is not int32.
    Exact.
    """
    agreed: Tensor = start_all_reduce_amax(bits, group)()
    return agreed


def start_all_reduce_amax(bits: Tensor, group: Any = None) -> Pending:
    """Start `all_reduce_amax`; returns a function that waits and returns the amaxes."""
    if bits.dtype is not torch.int32:
        raise ValueError(
            f"agree expects amaxes as the bits of float32 in int32, and got {bits.dtype}: pass "
            "x.abs().amax().float().view(torch.int32), whose integer order puts NaN above infinity above "
            "numbers"
        )
    work = dist.all_reduce(bits, dist.ReduceOp.MAX, group, async_op=True)
    return count_async("amaxes", "reduce", bits, group, work, bits)


def gather(x: Tensor, dim: int, group: Any = None, batches: int = 1, kind: Kind = "activations") -> Pending:
    """Start an all-gather of the shards of a tensor along one dimension.

    Args:
        x: this rank's shard; all ranks have the same shape.
        dim: the sharded dimension.
        batches: number of sequences stacked along `dim`, each sharded over all ranks.
        kind: kind of traffic, for the byte counters.
    Returns:
        A function that waits and returns the whole tensor, the same on all ranks. Exact: no bit changes.
    """
    ranks, part = dist.get_world_size(group), x.contiguous()
    whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]) if part.dim() else (ranks,))
    wait = count_async(kind, "gather", part, group, all_gather(whole, part, group, async_op=True))

    def finish() -> Tensor:
        wait()
        return whole if dim == 0 and batches == 1 else in_token_order(whole.view(ranks, *part.shape), dim, batches)

    return finish


def in_token_order(x: Tensor, dim: int, batches: int) -> Tensor:
    """Join the shards of all ranks, x [ranks, ...], along the dimension `dim` of a shard with `batches` sequences."""
    x = x.unflatten(dim + 1, (batches, x.shape[dim + 1] // batches)).movedim(0, dim + 1)
    return x.flatten(dim, dim + 2)


def gather_operand(q: Quantized, axis: int, group: Any = None, batches: int = 1) -> Pending:
    """Start an all-gather of the shards of a quantized operand: codes as bytes, and block scales.

    Per-tensor scales, and per-row scales where k is sharded, are not sent: ranks have agreed on them before they
    quantized.

    Args:
        q: this rank's shard [rows, k], of the same shape on all ranks and made of whole blocks.
        axis: 0 if rows are sharded, 1 if k is.
        group: process group; None is the default one.
        batches: as in `gather`.
    Returns:
        A function that waits and returns the whole operand. Exact: the codes and scales of the whole tensor.
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
    """Start an in-place all-reduce (sum) of x, float32 or float64.

    Args:
        kind: kind of traffic, for the byte counters.
    Returns:
        A function that waits and returns the sum, the same on all ranks.
    Raises:
        ValueError: x has another dtype.
    """
    _summable(x)
    return count_async(kind, "reduce", x, group, dist.all_reduce(x, dist.ReduceOp.SUM, group, async_op=True), x)


def scatter_sums(x: Tensor, group: Any = None, batches: int = 1) -> Pending:
    """Start a reduce-scatter (sum) of x [batches × tokens, n], float32 or float64, over tokens.

    On CPUs sums are in the order of ranks, on GPUs in that of the backend: NCCL may add in the network.

    Args:
        batches: number of sequences stacked in x; each rank gets its shard of every sequence.
    Returns:
        A function that waits and returns this rank's tokens of the sum, [batches × tokens / ranks, n].
    Raises:
        ValueError: x has another dtype.
    """
    _summable(x)
    ranks = dist.get_world_size(group)
    x = by_rank(x, ranks, batches)
    if not x.is_cuda:
        return sum_for_ranks(x.unflatten(0, (ranks, x.shape[0] // ranks)), group)
    part = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    work = reduce_scatter(part, x, dist.ReduceOp.SUM, group, async_op=True)
    return count_async("activations", "scatter", x, group, work, part)


def sum_for_ranks(parts: Tensor, group: Any = None, kind: Kind = "activations") -> Pending:
    """Start a reduce-scatter (sum) of parts [ranks, ...], float32 or float64, in the order of ranks.

    Returns:
        A function that waits and returns this rank's part of the sum, [...].
    """
    parts = parts.contiguous()
    sums = SumsInRankOrder(parts[0], group, kind)
    for step in range(1, sums.ranks):
        sums.exchange(step, 0, parts[(sums.rank + step) % sums.ranks])
    return lambda: sums.finish(parts[sums.rank])


def by_rank(x: Tensor, ranks: int, batches: int) -> Tensor:
    """Reorder the rows of x, `batches` stacked sequences, so that each rank's tokens are contiguous."""
    if batches > 1:
        x = x.unflatten(0, (batches, ranks, -1)).movedim(1, 0).flatten(0, 2)
    return x.contiguous()


class SumsInRankOrder:
    """Reduce-scatter (sum) by point-to-point messages: each rank adds the parts of ranks 0, 1, ... in this order.

    The bits do not depend on the backend's algorithm, nor on the number of messages. The traffic is that of a
    reduce-scatter; the parts of other ranks take its memory.

    Args:
        like: a tensor with the shape and dtype of one rank's part, float32 or float64.
        group: process group; None is the default one.
        kind: kind of traffic, for the byte counters.
    Raises:
        ValueError: another dtype.
    """

    def __init__(self, like: Tensor, group: Any = None, kind: Kind = "activations") -> None:
        _summable(like)
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        #: The parts that other ranks have computed for this one; entry s - 1 is of rank `self.rank - s`.
        self.received = like.new_empty((self.ranks - 1, *like.shape))
        self.works: list[Any] = []
        count(kind, "send", self.received, group, active.all)

    def exchange(self, step: int, start: int, part: Tensor) -> None:
        """Send rows of the part of rank `self.rank + step`, and receive the same rows of this rank's part.

        Args:
            start: index of the first row.
            part: rows of the part, contiguous.
        """
        own = self.received[step - 1, start : start + part.shape[0]]
        self.works += exchange(step, [part], [own], self.group)

    def finish(self, own: Tensor) -> Tensor:
        """Wait for the parts of other ranks and return the sum, given this rank's own part."""
        if self.works:
            with waiting(own):
                for work in self.works:
                    work.wait()
            self.works.clear()
        steps = [(self.rank - rank) % self.ranks for rank in range(self.ranks)]
        parts = [self.received[step - 1] if step else own for step in steps]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def exchange(step: int, sent: Sequence[Tensor], received: Sequence[Tensor], group: Any = None) -> list[Any]:
    """Start to send contiguous tensors to rank `own + step`, and to receive others from rank `own - step`.

    All ranks of the group call it with the same step and the same shapes. Returns torch's work handles.
    """
    group = group or dist.group.WORLD
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + by) % ranks) for by in (step, -step))
    sends = [dist.P2POp(dist.isend, x, to, group) for x in sent if x.numel()]
    receipts = [dist.P2POp(dist.irecv, x, source, group) for x in received if x.numel()]
    return dist.batch_isend_irecv([*sends, *receipts]) if sends else []


def merge_disjoint(x: Tensor, group: Any = None, dim: int | None = None) -> Pending:
    """Start to merge an x in which each element is nonzero on one rank only; all its bits are 0 on the others.

    Bytes are combined by maximum, not added, so every bit survives, including those of NaN and negative zero.

    Args:
        dim: None returns the whole tensor on every rank; otherwise each rank gets its shard of this dimension, whose
            size must be a multiple of the number of ranks.
    Returns:
        A function that waits and returns the whole tensor or this rank's shard.
    """
    if dim is None:
        whole = x.contiguous()
        work = dist.all_reduce(whole.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group, async_op=True)
        return count_async("activations", "reduce", whole, group, work, whole)
    ranks = dist.get_world_size(group)
    parts = x.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    work = reduce_scatter(
        own.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group, async_op=True
    )
    return count_async("activations", "scatter", parts, group, work, own)


def _summable(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"ranks can only sum float32 or float64, and this tensor is {x.dtype}: a collective would add "
            "codes as if they were numbers; convert or dequantize first"
        )


def scatter_quantized_sums(x: Tensor, spec: QuantSpec, group: Any = None) -> Tensor:
    """Reduce-scatter (sum) x [ranks × n], where each rank quantizes its values once.

    Codes and scales are sent as bytes in one all-to-all and summed in float32 in the order of ranks. A shard that is
    not a whole number of blocks is padded with zeros.

    Args:
        x: flat float32, bfloat16 or float16 tensor, of the same length on all ranks.
        spec: blocks of one row, rounded to nearest.
        group: process group; None is the default one.
    Returns:
        This rank's shard of the sum, [n] in float32. Exact: the float32 sum of the dequantized shards. A block with a
        NaN or an infinity on any rank is NaN.
    Raises:
        ValueError: an unsupported spec, or the length of x is no multiple of the number of ranks.
    """
    ranks = dist.get_world_size(group)
    if x.dim() != 1 or x.numel() % ranks:
        raise ValueError(
            f"{ranks} ranks can only sum a flat tensor whose length is a multiple of {ranks}, not shape "
            f"{tuple(x.shape)}: pad it"
        )
    part = x.numel() // ranks
    q = _quantized_rows(x.view(ranks, part), spec)
    sent = pack_rows(q)
    received = torch.empty_like(sent)
    with count_collective("gradients", "exchange", sent, group):
        dist.all_to_all_single(received, sent, group=group)
    del sent
    parts = ops.DEQUANTIZE(unpack_rows(received, q), torch.float32)
    total = parts[0].clone()
    for other in parts[1:]:
        total += other
    return total[:part]


def all_gather_quantized(x: Tensor, spec: QuantSpec, group: Any = None) -> Tensor:
    """All-gather every rank's x [n], quantized once by its rank.

    Returns:
        [ranks × n] in float32, the same bits on all ranks. A rank gets its own values dequantized, too.
    Raises:
        ValueError: a spec that `scatter_quantized_sums` does not accept.
    """
    q = _quantized_rows(x.view(1, -1), spec)
    whole = gather(pack_rows(q), 0, group, kind="gradients")()
    return ops.DEQUANTIZE(unpack_rows(whole, q), torch.float32)[:, : x.numel()].reshape(-1)


def check_gradient_spec(spec: Any) -> int:
    """Return the block size of a gradient spec. Raise a ValueError if gradients cannot be sent in it."""
    block = spec.block[1] if isinstance(spec, QuantSpec) else None
    if block is None or spec.block[0] != 1 or spec.rounding != "nearest" or spec.two_level or spec.hadamard:
        raise ValueError(
            f"gradients are quantized in blocks of one row and rounded to nearest, which {spec!r} is not: "
            "give a QuantSpec such as QuantSpec(quaver.E4M3, (1, 128))"
        )
    return block


def _quantized_rows(rows: Tensor, spec: QuantSpec) -> Quantized:
    """Quantize rows [m, n], padded with zeros to whole blocks."""
    block = check_gradient_spec(spec)
    return quantize(torch.nn.functional.pad(rows, (0, -rows.shape[1] % block)).contiguous(), spec).plain()


# ---- rows as bytes ----


def pack_rows(q: Quantized) -> Tensor:
    """Return uint8 [rows, bytes]: each row's codes followed by its scales. One scale for all is not packed."""
    codes = q.data.contiguous().view(torch.uint8)
    if q.spec.block[0] is None:
        return codes
    assert isinstance(q.scale, Tensor)
    scales = q.scale.reshape(-1).view(torch.uint8)
    return torch.cat([codes, scales.view(q.scale.shape[0], q.scale.shape[1] * q.scale.element_size())], 1)


def unpack_rows(rows: Tensor, like: Quantized) -> Quantized:
    """Undo `pack_rows` for any number of rows, with the other properties of `like`."""
    scale, size = like.scale, like.data.shape[1] * like.data.element_size()
    if like.spec.block[0] is not None:
        assert isinstance(scale, Tensor)
        # Flatten to one row first: torch cannot view a matrix with a single column as another dtype.
        scale = rows[:, size:].reshape(-1).clone().view(scale.dtype).view(rows.shape[0], scale.shape[1])
    data = rows[:, :size].contiguous().view(like.data.dtype)
    return Quantized(data, scale, like.spec, (rows.shape[0], like.shape[1]), False, like.tensor_factor)
