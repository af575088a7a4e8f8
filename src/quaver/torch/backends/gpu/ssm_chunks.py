"""Chunks of sequences for scans and convolutions on a GPU, computed without copying the lengths to the host."""

from typing import NamedTuple

import torch
from torch import Tensor

#: Most and fewest tokens of a chunk; matrix products need the latter.
MOST, FEWEST = 64, 16


class ChunkTable(NamedTuple):
    """Chunks of all sequences, in order."""

    #: Tokens of a chunk, number of chunks, number of sequences.
    size: int
    total: int
    sequences: int
    #: Chunks and tokens of a sequence if all sequences have the same length.
    per: int
    tokens: int
    #: int32 [total, 4] as `quaver.kernels.ssm.place_of` reads it, and int32 [sequences + 1] with the first chunk of
    #: each sequence; both None if all have the same length.
    table: Tensor | None = None
    ranges: Tensor | None = None

    @property
    def even(self) -> bool:
        """True if every chunk is known to be full."""
        return self.table is None and self.tokens % self.size == 0


def chunks_of(x: Tensor, cu_seqlens: Tensor | None, chunk: int, most: int = MOST) -> ChunkTable:
    """Return the chunks of x [B, T, ...], or of the sequences packed in its single row.

    Args:
        chunk: requested tokens per chunk, 0 for the maximum.
        most: maximum tokens per chunk, a power of two.
    """
    batch, tokens = x.shape[:2]
    size = most if not chunk else min(most, max(FEWEST, 1 << (chunk.bit_length() - 1)))
    if cu_seqlens is None:
        per = -(-tokens // size)
        return ChunkTable(size, batch * per, batch, per, tokens)
    starts = cu_seqlens.to(x.device, torch.int64)
    sequences = starts.shape[0] - 1
    # Upper bound of the number of chunks; those after the last sequence have no tokens.
    count = tokens // size + sequences
    ranges = torch.zeros(sequences + 1, dtype=torch.int64, device=x.device)
    torch.cumsum((starts.diff() + size - 1) // size, 0, out=ranges[1:])
    every = torch.arange(count, dtype=torch.int64, device=x.device)
    own = torch.bucketize(every, ranges[1:], right=True).clamp_(max=sequences - 1)
    before = (every - ranges[own]) * size
    first = starts[own] + before
    rest = (starts[own + 1] - first).clamp_(min=0).masked_fill_(every >= ranges[-1], 0)
    table = torch.stack((first, rest, before, own), 1).to(torch.int32)
    return ChunkTable(size, count, sequences, 0, 0, table, ranges.to(torch.int32))
