"""Sequences laid end to end, and the chunks that a scan cuts them into: none has tokens of two sequences."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Places for the tokens of all sequences, `size` to a chunk; a sequence's last chunk may have some to spare."""

    size: int
    #: By chunk: the sequence that begins with it, or -1; and the sequence that ends with it, or -1.
    begins: list[int]
    ends: list[int]
    #: The token of each place, int64 [chunks · size]; None where they lie so anyway.
    tokens: Tensor | None
    #: bool [chunks, size], True where no token is; None where there is one everywhere.
    spare: Tensor | None

    def taken(self, x: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """x [tokens, ...] in some chunks: [chunks, size, ...] in a dtype, 0 in places to spare."""
        a, b, lead = first * self.size, last * self.size, (last - first, self.size)
        if self.tokens is None:
            return x[a:b].to(dtype).view(*lead, *x.shape[1:])
        taken = x.index_select(0, self.tokens[a:b]).to(dtype).view(*lead, *x.shape[1:])
        if self.spare is None:
            return taken
        return taken.masked_fill_(self.spare[first:last].view(*lead, *(1,) * (x.dim() - 1)), 0)

    def put(self, out: Tensor, values: Tensor, first: int, last: int) -> None:
        """Write values [chunks, size, ...] to their tokens in out [tokens, ...]."""
        flat = values.reshape(-1, *values.shape[2:])
        if self.tokens is None:
            out[first * self.size : last * self.size].copy_(flat)
            return
        tokens = self.tokens[first * self.size : last * self.size]
        if self.spare is not None:
            there = (~self.spare[first:last]).flatten().nonzero().squeeze(1)
            tokens, flat = tokens[there], flat[there]
        out.index_copy_(0, tokens, flat.to(out.dtype))


def chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
    """The chunks of sequences that lie one after the other."""
    counts = [-(-length // size) for length in lengths]
    begins, ends = [-1] * sum(counts), [-1] * sum(counts)
    for sequence, (count, last) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if count:
            begins[last - count], ends[last - 1] = sequence, sequence
    if all(length % size == 0 for length in lengths):
        return Chunks(size, begins, ends, None, None)
    starts = [0, *accumulate(lengths)]
    place = torch.arange(max(counts) * size, dtype=torch.int64, device=device)
    tokens = torch.cat([start + place[: count * size] for start, count in zip(starts, counts, strict=False)])
    spare = torch.cat([place[: n * size] >= length for n, length in zip(counts, lengths, strict=True)])
    return Chunks(size, begins, ends, tokens.masked_fill_(spare, 0), spare.view(-1, size))
