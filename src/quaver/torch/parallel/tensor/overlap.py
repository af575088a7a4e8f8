"""Overlap of communication and GEMMs: tokens of other ranks are gathered, or sums for them sent, while GEMMs run.

    all-gather → GEMM       a rank multiplies its own tokens while those of others arrive, then those that have arrived
    GEMM → reduce-scatter   a rank computes the sums for others first, and its own while those are sent

Chunks of tokens go point to point, as codes and scales where the recipe quantizes. Tested over gloo; nothing has run on
NCCL. `quaver.torch.parallel.tensor.symmetric_memory` has another path, for unquantized operands on some GPUs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.torch.backends.cpu.decode import decode
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.parallel import comm
from quaver.torch.parallel.comm_counter import count_async
from quaver.torch.state.history.sync import check_agreement

# ---- chunks ----

#: Fewest tokens of a chunk. A GEMM of fewer rows wastes most of a GPU's tile, and on a CPU it sums in another order.
SMALLEST = 32
#: Output features up to which the order of a CPU's sums depends on the number of rows.
NARROW_OUTPUT = 16

Rows = tuple[int, int]


def chunk_rows(tokens: int, chunks: int, block: int | None) -> list[Rows]:
    """Divide rows into at most `chunks` ranges [start, stop) at multiples of a block's height; none if they are few."""
    unit = math.lcm(SMALLEST, block or 1)
    count = min(chunks, tokens // unit)
    return list(pairwise([*(tokens // unit * i // count * unit for i in range(count)), tokens]))


def has_independent_rows(device: torch.device, features: int, dtype: torch.dtype) -> bool:
    """Return True if a GEMM with this output gives the same bits for a chunk of its rows as for all of them.

    On CPUs the sums of bfloat16 GEMMs, and of a few columns, depend on the number of rows. Not measured on GPUs.
    """
    return device.type != "cpu" or (features > NARROW_OUTPUT and dtype in (torch.float32, torch.float64))


def _needs_whole(x: Any) -> bool:
    """Return True if a CPU multiplies x by the reference, because of scales of any row that float32 cannot represent.

    A chunk without that row would be multiplied in float32, with other bits.
    """
    return isinstance(x, Quantized) and x.data.is_cpu and decode(x, as_bf16=False, tiny=True, slot="left") is None


def rows_of(x: Any, start: int, stop: int) -> Any:
    """Return rows of a GEMM operand [m, k], a tensor or row-major codes, from a multiple of the block height on."""
    if isinstance(x, Tensor):
        return x[start:stop]
    scale, block = x.scale, x.spec.block[0]
    if block is not None:
        scale = scale[start // block : -(-stop // block)]
    return Quantized(x.data[start:stop], scale, x.spec, (stop - start, x.shape[1]), False, x.tensor_factor)


def _stored(x: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors of an operand that have its rows, each with the rows of the operand per row."""
    if isinstance(x, Tensor):
        return [(x, 1)]
    codes = x.data.view(torch.uint8), 1
    return [codes] if x.spec.block[0] is None else [codes, (x.scale, x.spec.block[0])]


def _rebuilt(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an operand like x with other rows, from tensors like those of `_stored`."""
    if isinstance(x, Tensor):
        return tensors[0]
    scale = x.scale if len(tensors) == 1 else tensors[1]
    shape = tensors[0].shape[0], x.shape[1]
    return Quantized(tensors[0].view(x.data.dtype), scale, x.spec, shape, False, x.tensor_factor, x.amax)


# ---- all-gather → GEMM ----


class ChunkedGather:
    """All-gather of the rows of a GEMM operand in chunks, which a GEMM reads as they arrive.

    Called, it waits for all and returns the whole operand, as `comm.gather_operand` does.

    Args:
        x: this rank's rows [t, k], a tensor or row-major codes.
        chunks: ranges of rows, see `chunk_rows`.
        group: process group.
        batches: number of sequences stacked in x.
    Exact: no bit changes.
    """

    def __init__(self, x: Any, chunks: Sequence[Rows], group: Any, batches: int) -> None:
        self.x, self.batches = x.contiguous() if isinstance(x, Tensor) else x.plain(), batches
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.on_cpu = self.x.device.type == "cpu"
        self.stored = [(own.new_empty((self.ranks, *own.shape)), block) for own, block in _stored(self.x)]
        for (own, _), (whole, _) in zip(_stored(self.x), self.stored, strict=True):
            whole[self.rank].copy_(own)
        #: (rank, rows, function that waits for them) in the order of arrival.
        self.arrivals: list[tuple[int, Rows, Callable[[], Any]]] = []
        self._whole: Any = None
        for step in range(1, self.ranks):
            for rows in chunks:
                source = (self.rank - step) % self.ranks
                sent, received = (self._tensors(rank, rows) for rank in (self.rank, source))
                works = comm.exchange(step, sent, received, group)
                # The first wait waits for all messages of the chunk.
                waits = [count_async("activations", "send", t, group, works if t is sent[0] else []) for t in sent]
                self.arrivals.append((source, rows, cache(waits[0])))

    def _tensors(self, rank: int, rows: Rows) -> list[Tensor]:
        start, stop = rows
        return [whole[rank, start // block : -(-stop // block)] for whole, block in self.stored]

    def __call__(self) -> Any:
        if self._whole is None:
            for _, _, wait in self.arrivals:
                wait()
            self._whole = _rebuilt(self.x, [comm.in_token_order(t, 0, self.batches) for t, _ in self.stored])
        return self._whole

    def chunks(self) -> Iterator[tuple[int, int, Any]]:
        """Yield (rank, first row, rows of the operand): this rank's, then those of others as they arrive."""
        yield self.rank, 0, self.x
        for rank, rows, wait in self.arrivals:
            wait()
            yield rank, rows[0], _rebuilt(self.x, self._tensors(rank, rows))


def gemm_of_gathered(x: Any, multiply: Callable[[Any], Tensor]) -> Tensor:
    """Return multiply(whole operand) of a pending all-gather, chunk by chunk if it is a `ChunkedGather`."""
    if not isinstance(x, ChunkedGather):
        return multiply(x())
    products = {(rank, start): multiply(rows) for rank, start, rows in x.chunks()}
    if x.on_cpu and _needs_whole(x()):
        return multiply(x())
    y = torch.cat([products[place] for place in sorted(products)])
    return comm.in_token_order(y.unflatten(0, (x.ranks, -1)), 0, x.batches)


# ---- GEMM → reduce-scatter ----


def scatter_products(
    x: Any, chunks: Sequence[Rows], multiply: Callable[[Any], Tensor], group: Any, batches: int
) -> comm.Pending:
    """Multiply the tokens of each rank and start to send the products, which each rank sums in the order of ranks.

    Args:
        x: GEMM operand with the tokens of all ranks [T, k], a tensor or row-major codes.
        chunks: ranges of one rank's rows, see `chunk_rows`.
        multiply: function of rows [m, k] that returns products [m, n] in float32 or float64.
        group: process group.
        batches: number of sequences stacked in x.
    Returns:
        A function that waits and returns this rank's tokens of the sum, the bits of `comm.scatter_sums`.
    """
    ranks, t = dist.get_world_size(group), x.shape[0] // dist.get_world_size(group)
    x = x if isinstance(x, Tensor) else x.plain()
    x = _rebuilt(x, [comm.by_rank(tensor, ranks, batches) for tensor, _ in _stored(x)])
    if _needs_whole(x):
        # The chunks are then rows of the product.
        x, multiply = multiply(x), Tensor.contiguous
    rank, sums = dist.get_rank(group), None
    for step in range(1, ranks):
        first = (rank + step) % ranks * t
        for start, stop in chunks:
            product = multiply(rows_of(x, first + start, first + stop))
            sums = sums or comm.SumsInRankOrder(product.new_empty((t, product.shape[1])), group)
            sums.exchange(step, start, product)
    own = multiply(rows_of(x, rank * t, (rank + 1) * t))
    return lambda: own if sums is None else sums.finish(own)


# ---- meshes ----


def check_mesh(mesh: Any, style: str, chunks: int) -> None:
    """Raise on all ranks if they overlap in other chunks, or if one of them cannot send a byte point to point.

    Args:
        mesh: one-dimensional device mesh.
        style: name of the style, for the message.
        chunks: chunks of a rank's tokens, 0 without overlap.
    Raises:
        ValueError: on all ranks.
    """
    group, device = mesh.get_group(), mesh.device_type
    check_agreement(style, {"chunks of overlap": chunks}, group)
    if not chunks or mesh.size() == 1:
        return
    sent, received = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    works, error = list[Any](), ""
    try:
        works = comm.exchange(1, [sent], [received], group)
    except Exception as raised:
        # Catch any exception: the other ranks wait.
        backend = dist.get_backend(group)
        error = (
            f"{style} with overlap sends tokens from rank to rank, which backend {backend} cannot on {device} "
            f"({raised}): leave overlap out, or make the mesh with gloo on CPUs or NCCL on GPUs"
        )
    check_agreement(f"{style} with overlap", {}, group, error=error)
    for work in works:
        work.wait()
