"""Where the parts of a sequence lie, and which keys its queries see; nothing goes between ranks here.

A causal query sees the keys before it, so that the last part of a sequence has more work than the first. In the
balanced order the sequence is cut in twice as many chunks as there are ranks, and rank r holds chunks r and 2 ranks -
1 - r: each rank has as many pairs of a query and a key that it sees.

Source: Brandon et al. 2023, arXiv:2311.09431 (striped); the order by halves is Megatron's and Llama 3's
(arXiv:2407.21783 §3.3.2).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.torch.blocks.attention.inputs.masks import alibi


class Order(NamedTuple):
    """Which chunks of a sequence each rank holds."""

    ranks: int
    balanced: bool = True

    @property
    def chunks(self) -> int:
        """Chunks of equal length that a sequence is cut in."""
        return 2 * self.ranks if self.balanced else self.ranks

    def of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them."""
        return (rank, self.chunks - 1 - rank) if self.balanced else (rank,)

    def spans(self, rank: int, tokens: int) -> list[tuple[int, int]]:
        """The first and one past the last token of each chunk of a rank, of a sequence of so many tokens."""
        length = tokens // self.chunks
        return [(chunk * length, (chunk + 1) * length) for chunk in self.of(rank)]

    def cut(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The chunks of a rank, of the whole.

        Raises:
            ValueError: the sequence does not divide.
        """
        tokens = x.shape[dim]
        if tokens % self.chunks:
            padded = -(-tokens // self.chunks) * self.chunks
            other = f", or take balanced=False for multiples of {self.ranks}" if self.balanced else ""
            raise ValueError(
                f"a sequence of {tokens} tokens (dimension {dim} of {list(x.shape)}) does not divide into "
                f"{self.chunks} chunks for {self.ranks} ranks; pad it to {padded}{other}"
            )
        return torch.cat([x.narrow(dim, a, b - a) for a, b in self.spans(rank, tokens)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole, of what each rank holds."""
        length = parts[0].shape[dim] // len(self.of(0))
        chunks: list[Tensor | None] = [None] * self.chunks
        for rank, part in enumerate(parts):
            for chunk, piece in zip(self.of(rank), part.split(length, dim) if length else (part, part), strict=False):
                chunks[chunk] = piece
        return torch.cat([piece for piece in chunks if piece is not None], dim)

    def places(self, tokens: int, rank: int, device: torch.device | None = None) -> Tensor:
        """int64: where each token of a rank stands in a sequence of so many tokens."""
        return self.cut(torch.arange(tokens, dtype=torch.int64, device=device), 0, rank)


class Sight(NamedTuple):
    """Which keys a query sees, both by where they stand in the whole sequence, or in sequences laid end to end."""

    #: How many keys before and after itself, -1 for all; (-1, 0) is causal.
    left: int = -1
    right: int = -1
    #: Keys of its own run of so many positions alone; None for all.
    chunk: int | None = None
    #: float32 [H] or [B, H]: scores fall with the distance.
    slopes: Tensor | None = None
    #: Where sequences that are laid end to end begin and end.
    ends: tuple[int, ...] | None = None

    @property
    def by_position(self) -> bool:
        """True if something beside the sequences' ends hides or bends."""
        return self.left >= 0 or self.right >= 0 or self.chunk is not None or self.slopes is not None

    def keys_of(self, begin: int, end: int, tokens: int) -> tuple[int, int]:
        """The first key, and one past the last, that queries from `begin` to `end` may see, of so many.

        With runs of `chunk` keys the first one begins a run, or the sequence where there are several.
        """
        first = 0 if self.left < 0 or self.chunk is not None else max(begin - self.left, 0)
        last = tokens if self.right < 0 else min(end + self.right, tokens)
        if self.ends is not None and len(self.ends) > 1:
            first = max(first, self.ends[bisect_right(self.ends, begin) - 1])
            last = min(last, self.ends[bisect_right(self.ends, end - 1)])
        elif self.chunk is not None:
            first = begin // self.chunk * self.chunk
            last = min(last, -(-end // self.chunk) * self.chunk)
        return min(first, last), last

    def hides_some(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """False where every query of a span sees every key of another."""
        if self.ends is not None or self.chunk is not None:
            return True
        (a, b), (c, d) = queries, keys
        return (self.right >= 0 and d - 1 - a > self.right) or (self.left >= 0 and b - 1 - c > self.left)

    def hidden(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """bool [1, 1, queries, keys], True where a query of a span does not see a key of another; None for nowhere."""
        if not self.hides_some(queries, keys):
            return None
        of_queries, of_keys = (torch.arange(a, b, dtype=torch.int64, device=device) for a, b in (queries, keys))
        of_queries = of_queries[:, None]
        hidden = torch.zeros((), dtype=torch.bool, device=device)
        if self.ends is not None:
            starts = torch.tensor(self.ends, dtype=torch.int64, device=device)
            sequence_of_queries, sequence_of_keys = (
                torch.bucketize(x, starts[1:], right=True) for x in (of_queries, of_keys)
            )
            hidden = hidden | (sequence_of_queries != sequence_of_keys)
            last = starts.shape[0] - 1
            of_queries, of_keys = (
                x - starts[s.clamp(max=last)]
                for x, s in ((of_queries, sequence_of_queries), (of_keys, sequence_of_keys))
            )
        ahead = of_keys - of_queries
        if self.right >= 0:
            hidden = hidden | (ahead > self.right)
        if self.left >= 0:
            hidden = hidden | (ahead < -self.left)
        if self.chunk is not None:
            hidden = hidden | (of_keys // self.chunk != of_queries // self.chunk)
        return hidden[None, None] if hidden.dim() else None

    def bias(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """float32 [B or 1, H, queries, keys] of ALiBi; None without slopes."""
        if self.slopes is None:
            return None
        of_queries, of_keys = (torch.arange(a, b, dtype=torch.int64, device=device) for a, b in (queries, keys))
        return alibi(self.slopes, (of_keys - of_queries[:, None])[None, None])
