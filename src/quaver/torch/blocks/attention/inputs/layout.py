"""Layouts of attention's tensors, and ragged batches: sequences laid end to end, told apart by cumulative lengths.

Inside, everything is [B, H, S, D]; a ragged batch is a batch of one. Both ways are views.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.core.reference.masks import check_heads
from quaver.core.text.given import instance
from quaver.core.text.spelling import check_name
from quaver.torch.numerics.host_values import host_values
from quaver.torch.numerics.tracing import is_tracing

#: What the axes of q, k and v are.
LAYOUTS = {
    "bshd": "[batch, tokens, heads, features]",
    "sbhd": "[tokens, batch, heads, features]",
    "thd": "[tokens, heads, features]",
}

CuSeqlens = Tensor | tuple[Tensor, Tensor]


class Ragged(NamedTuple):
    """Where sequences begin and end among the tokens."""

    #: int [sequences + 1] each, from 0 to the number of tokens.
    of_queries: Tensor
    of_keys: Tensor
    #: The lengths on the host, (of queries, of keys); None while a compiler traces.
    lengths: tuple[list[int], list[int]] | None

    def sequence_of_tokens(self, queries: int, keys: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        """The number of the sequence that each query and each key belongs to, [queries] and [keys]."""
        pairs = ((self.of_queries, queries), (self.of_keys, keys))
        of_queries, of_keys = (_sequence(ends.to(device), tokens) for ends, tokens in pairs)
        return of_queries, of_keys

    def positions(
        self, queries: int, keys: int, bottom_right: bool, device: torch.device | str | None
    ) -> tuple[Tensor, Tensor]:
        """The position in its own sequence of each query and key, queries' shifted to the keys' end on demand."""
        starts, key_starts = self.of_queries.to(device), self.of_keys.to(device)
        sequence = _sequence(starts, queries)
        of_queries = torch.arange(queries, dtype=torch.int64, device=device) - starts[sequence]
        of_keys = torch.arange(keys, dtype=torch.int64, device=device) - key_starts[_sequence(key_starts, keys)]
        if bottom_right:
            of_queries = of_queries + (key_starts.diff() - starts.diff())[sequence]
        return of_queries, of_keys


def _sequence(cumulative: Tensor, tokens: int) -> Tensor:
    every = torch.arange(tokens, dtype=torch.int64, device=cumulative.device)
    sequence = torch.bucketize(every, cumulative[1:].long(), right=True)
    # A compiler does not look whether the last sequence ends with the tokens; what lies beyond belongs to it.
    return sequence.clamp(max=max(cumulative.shape[0] - 2, 0))


def heads_first(x: Tensor, layout: str) -> Tensor:
    """[B, H, S, D], a view."""
    if layout == "bshd":
        return x.transpose(1, 2)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(0, 1).unsqueeze(0)


def heads_back(x: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] in the layout, a view."""
    if layout == "bshd":
        return x.transpose(1, 2)
    return x.permute(2, 0, 1, 3) if layout == "sbhd" else x.squeeze(0).transpose(0, 1)


def all_heads_first(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv], views.

    Raises:
        ValueError: the layout is none, or shapes, heads or dtypes do not go together.
    """
    check_name("layout", layout, LAYOUTS)
    axes = LAYOUTS[layout]
    dims = 3 if layout == "thd" else 4
    if q.dim() != dims or k.dim() != dims or v.dim() != dims:
        raise ValueError(f"attention in layout {layout!r} takes {axes}; got {_shapes(q, k, v)}")
    wide, keys, values = heads_first(q, layout), heads_first(k, layout), heads_first(v, layout)
    (batch, heads, _, dim), (key_batch, groups, _, key_dim) = wide.shape, keys.shape
    if batch != key_batch or dim != key_dim or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"{_shapes(q, k, v)} do not fit {axes}: q and k share batch and features, "
            "k and v share batch, tokens and heads"
        )
    check_heads(heads, groups)
    if not q.dtype is k.dtype is v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; convert them to one floating-point dtype, "
            "or enter torch.autocast"
        )
    return wide, keys, values


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"


def ragged_of(layout: str, cu_seqlens: CuSeqlens | None, queries: int, keys: int) -> Ragged | None:
    """The cumulative lengths, checked; values only in eager mode, where those of a GPU cost a synchronization."""
    if layout != "thd":
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens goes with layout 'thd'; {layout!r} has a batch axis and takes a padding mask")
        return None
    if cu_seqlens is None:
        raise ValueError("layout 'thd' needs cu_seqlens: int [sequences + 1], from 0 to the number of tokens")
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or not all(isinstance(ends, Tensor) for ends in pair):
        given = f"{len(pair)} of them" if isinstance(cu_seqlens, tuple) else f"a {type(cu_seqlens).__name__}"
        raise ValueError(
            f"cu_seqlens is {given}; give an int tensor [sequences + 1], or a pair (of queries, of keys) of them"
        )
    lengths = []
    for name, ends, tokens in zip(("queries", "keys"), pair, (queries, keys), strict=True):
        checked = lengths_of(ends, tokens, f" of the {name}")
        if checked is not None:
            lengths.append(checked)
    if pair[0].shape != pair[1].shape:
        raise ValueError(
            f"cu_seqlens has {pair[0].shape[0] - 1} sequences of queries and {pair[1].shape[0] - 1} of keys; "
            "give each sequence of queries its keys"
        )
    return Ragged(*pair, (lengths[0], lengths[1]) if lengths else None)


def lengths_of(cu_seqlens: Tensor, tokens: int, of: str = "") -> list[int] | None:
    """The lengths on the host, which cost a synchronization with a GPU; None while a compiler traces.

    Args:
        of: what the tokens are, for messages.
    Raises:
        ValueError: it is no int tensor [sequences + 1], or does not ascend from 0 to the number of tokens.
    """
    instance(f"cu_seqlens{of}", "it", cu_seqlens, Tensor, "torch.tensor([0, 5, 9])")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens{of} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "give int32 or int64 [sequences + 1], from 0 to the number of tokens"
        )
    if is_tracing() or cu_seqlens.is_meta:
        return None
    ends = host_values(cu_seqlens)
    lengths = [b - a for a, b in pairwise(ends)]
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens{of} starts at {ends[0]}; it starts at 0")
    for n, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens{of} falls from {ends[n]} to {ends[n + 1]} at position {n + 1}; it must ascend"
            )
    if ends[-1] != tokens:
        raise ValueError(f"cu_seqlens{of} ends at {ends[-1]} and there are {tokens} tokens; they must agree")
    return lengths
