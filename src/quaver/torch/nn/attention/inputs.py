"""Arguments of attention in a common form: layouts, ragged batches, masks and windows, validated."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes.text import check_instance, check_name
from quaver.reference.attention import MASKS, check_heads, check_type, check_window
from quaver.torch.backends.gpu import capture
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.numerics.versions import host_values
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- layouts and ragged batches, whose sequences are concatenated and described by cumulative lengths ----
#
# Internally everything is [B, H, S, D]; a ragged batch is a batch of one. Conversions are views.

#: Axes of q, k and v by layout.
LAYOUTS = {
    "bshd": "[batch, tokens, heads, features]",
    "sbhd": "[tokens, batch, heads, features]",
    "thd": "[tokens, heads, features]",
}

CuSeqlens = Tensor | tuple[Tensor, Tensor]


class RaggedLayout(NamedTuple):
    """Boundaries of sequences among the concatenated tokens."""

    #: Cumulative lengths of queries and of keys, int [sequences + 1] each, from 0 to the number of tokens.
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    #: Lengths on the host, (of queries, of keys); None while tracing.
    lengths: tuple[list[int], list[int]] | None

    def sequence_of_tokens(self, queries: int, keys: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        """Return the sequence number of each query and each key, [queries] and [keys]."""
        pairs = ((self.cu_seqlens_q, queries), (self.cu_seqlens_k, keys))
        query_sequence, key_sequence = (_sequence(ends.to(device), tokens) for ends, tokens in pairs)
        return query_sequence, key_sequence

    def positions(
        self, queries: int, keys: int, bottom_right: bool, device: torch.device | str | None
    ) -> tuple[Tensor, Tensor]:
        """Return the position of each query and key in its sequence.

        With bottom_right, query positions are shifted so that the last query has the position of the last key.
        """
        starts, key_starts = self.cu_seqlens_q.to(device), self.cu_seqlens_k.to(device)
        sequence = _sequence(starts, queries)
        query_positions = torch.arange(queries, dtype=torch.int64, device=device) - starts[sequence]
        key_positions = torch.arange(keys, dtype=torch.int64, device=device) - key_starts[_sequence(key_starts, keys)]
        if bottom_right:
            query_positions = query_positions + (key_starts.diff() - starts.diff())[sequence]
        return query_positions, key_positions


def _sequence(cumulative: Tensor, tokens: int) -> Tensor:
    every = torch.arange(tokens, dtype=torch.int64, device=cumulative.device)
    sequence = torch.bucketize(every, cumulative[1:].long(), right=True)
    # While tracing, the end of the last sequence is not checked; tokens after it belong to it.
    return sequence.clamp(max=max(cumulative.shape[0] - 2, 0))


def heads_first(x: Tensor, layout: str) -> Tensor:
    """Return x as a view [B, H, S, D]."""
    if layout == "bshd":
        return x.transpose(1, 2)
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(0, 1).unsqueeze(0)


def heads_back(x: Tensor, layout: str) -> Tensor:
    """Return x [B, H, S, D] as a view in the layout."""
    if layout == "bshd":
        return x.transpose(1, 2)
    return x.permute(2, 0, 1, 3) if layout == "sbhd" else x.squeeze(0).transpose(0, 1)


def all_heads_first(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv].

    Raises:
        ValueError: unknown layout, or shapes, heads or dtypes that do not fit.
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


def ragged_of(layout: str, cu_seqlens: CuSeqlens | None, queries: int, keys: int) -> RaggedLayout | None:
    """Validate cumulative lengths; the values only in eager mode, where those on a GPU cost a synchronization."""
    if layout != "thd":
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens requires layout 'thd'; {layout!r} has a batch axis and takes a padding mask")
        return None
    if cu_seqlens is None:
        raise ValueError("layout 'thd' needs cu_seqlens: int [sequences + 1], from 0 to the number of tokens")
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or not all(isinstance(ends, Tensor) for ends in pair):
        description = f"{len(pair)} of them" if isinstance(cu_seqlens, tuple) else f"a {type(cu_seqlens).__name__}"
        raise ValueError(
            f"cu_seqlens is {description}; give an int tensor [sequences + 1], or a pair (of queries, of keys) of them"
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
    return RaggedLayout(*pair, (lengths[0], lengths[1]) if lengths else None)


def lengths_of(cu_seqlens: Tensor, tokens: int, of: str = "") -> list[int] | None:
    """Return the lengths on the host, which costs a synchronization with a GPU; None while tracing.

    Args:
        cu_seqlens: cumulative lengths.
        tokens: number of tokens.
        of: what the tokens are, for error messages.
    Raises:
        ValueError: it is not an int tensor [sequences + 1], or does not ascend from 0 to the number of tokens.
    """
    check_instance(f"cu_seqlens{of}", "it", cu_seqlens, Tensor, "torch.tensor([0, 5, 9])")
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


# ---- masks: **True means masked out**, here and everywhere ----
#
# All masks are tensor arithmetic on positions. No branch reads a value, so a compiler can trace it.

Mask = Tensor | tuple[Tensor, Tensor]
Window = tuple[int, int]

#: A window that hides nothing.
OPEN: Window = (-1, -1)


def hidden(
    mask_type: str,
    mask: Mask | None,
    window: Window | None,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None = None,
    ragged: RaggedLayout | None = None,
    chunk: int | None = None,
) -> Tensor | None:
    """Return the mask that is True where a query may not see a key.

    Args:
        mask_type: a name from `MASKS`.
        mask: True where masked out. Padding: [B, Sk] for both queries and keys, or ([B, Sq], [B, Sk]). Arbitrary:
            broadcastable to [B, H, Sq, Sk].
        window: (left, right): a query sees that many keys before and after its own position, -1 for all.
        shape: of the scores, (B, H, Sq, Sk).
        device: of the result.
        ragged: boundaries of the sequences in a batch of one.
        chunk: a query sees only keys in its own chunk of this many positions; None for all.
    Returns:
        Boolean, broadcastable to [B, H, Sq, Sk]; None if nothing is hidden.
    """
    parts: list[Tensor] = []
    if mask_type == "arbitrary":
        assert isinstance(mask, Tensor)
        parts.append(_four(mask))
    elif mask is not None:
        query_mask, key_mask = both(mask)
        parts += [query_mask[:, None, :, None], key_mask[:, None, None, :]]
    if ragged is not None:
        query_sequence, key_sequence = ragged.sequence_of_tokens(shape[2], shape[3], device)
        parts.append((query_sequence[:, None] != key_sequence)[None, None])
    left, right = bounds(mask_type, window)
    if left >= 0 or right >= 0 or chunk is not None:
        ahead = ahead_of_query(mask_type, mask, shape, device, ragged)
        if right >= 0:
            parts.append(ahead > right)
        if left >= 0:
            parts.append(ahead < -left)
        if chunk is not None:
            key_positions = positions_of_keys(mask_type, mask, shape, device, ragged)
            parts.append(key_positions // chunk != (key_positions - ahead) // chunk)
    whole = None
    for part in parts:
        whole = part if whole is None else whole | part
    return whole


def runs_of_keys(
    mask_type: str,
    window: Window | None,
    queries: int,
    keys: int,
    device: torch.device | str | None = None,
    ragged: RaggedLayout | None = None,
    chunk: int | None = None,
) -> Tensor | None:
    """Return the range of visible keys per query, int32 [2, Sq]: first key and one past the last; None if all are
    visible.

    For masks without tensors. Both rows are non-decreasing; a query with an empty range sees nothing.
    """
    left, right = bounds(mask_type, window)
    bottom_right = mask_type.endswith("bottom_right")
    if ragged is not None:
        where, _ = ragged.positions(queries, keys, bottom_right, device)
        sequence, _ = ragged.sequence_of_tokens(queries, keys, device)
        ends = ragged.cu_seqlens_k.to(device)
        start, length = ends[sequence], ends.diff()[sequence]
    elif left < 0 and right < 0 and chunk is None:
        return None
    else:
        where = torch.arange(queries, dtype=torch.int64, device=device) + (keys - queries) * bottom_right
        start, length = torch.zeros_like(where), torch.full_like(where, keys)
    first = torch.zeros_like(where) if left < 0 else where - left
    last = length if right < 0 else where + right + 1
    if chunk is not None:
        begin = where // chunk * chunk
        first, last = torch.maximum(first, begin), torch.minimum(last, begin + chunk)
    first, last = (start + torch.minimum(end.clamp(min=0), length) for end in (first, last))
    return torch.stack((first, last)).int()


def outside_of(runs: Tensor, keys: int) -> Tensor:
    """Convert ranges from `runs_of_keys` to a mask [1, 1, Sq, Sk], True where hidden."""
    every = torch.arange(keys, dtype=torch.int32, device=runs.device)
    return ((every < runs[0][:, None]) | (every >= runs[1][:, None]))[None, None]


def ahead_of_query(
    mask_type: str,
    mask: Mask | None,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None = None,
    ragged: RaggedLayout | None = None,
) -> Tensor:
    """Return each key's position minus each query's, [B or 1, 1, Sq, Sk], aligned by the mask type.

    Top left: query 0 is aligned with key 0. Bottom right: the last query is aligned with the last key, without padding.
    """
    _, _, queries, keys = shape
    bottom_right = mask_type.endswith("bottom_right")
    if ragged is not None:
        query_positions, key_positions = ragged.positions(queries, keys, bottom_right, device)
        return (key_positions - query_positions[:, None])[None, None]
    key_positions, query_positions = (torch.arange(n, dtype=torch.int64, device=device) for n in (keys, queries))
    ahead = key_positions - query_positions[:, None]
    if not bottom_right:
        return ahead[None, None]
    if mask is None:
        return ahead[None, None] - (keys - queries)
    padded_queries, padded_keys = both(mask)
    shift = (~padded_keys).sum(-1) - (~padded_queries).sum(-1)
    return ahead[None, None] - shift[:, None, None, None]


def positions_of_keys(
    mask_type: str,
    mask: Mask | None,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None = None,
    ragged: RaggedLayout | None = None,
) -> Tensor:
    """Return the positions of keys, counted from the first one that is not padding, [B or 1, 1, 1, Sk]; for chunks."""
    if ragged is not None:
        return ragged.positions(shape[2], shape[3], False, device)[1][None, None, None]
    every = torch.arange(shape[3], dtype=torch.int64, device=device)
    if mask is None or mask_type == "arbitrary":
        return every[None, None, None]
    return (every - leading_padding(mask)[:, None])[:, None, None]


def leading_padding(mask: Mask) -> Tensor:
    """Return the number of padding keys before the first real one, int64 [B]."""
    return both(mask)[1].long().cumprod(-1).sum(-1)


def alibi(slopes: Tensor, ahead: Tensor) -> Tensor:
    """Return ALiBi's bias -slope × distance, float32 [B or 1, H, Sq, Sk], for slopes [H] or [B, H]."""
    return -slopes.float().reshape(-1, slopes.shape[-1], 1, 1) * ahead.abs()


def bounds(mask_type: str, window: Window | None) -> Window:
    """Return the window combined with the causal mask, which hides all later keys."""
    left, right = window or OPEN
    return (left, 0) if MASKS[mask_type][1] else (left, right)


def simplify(
    mask_type: str, window: Window | None, queries: int, keys: int, aligned: bool = False
) -> tuple[str, Window | None]:
    """Return the simplest mask type and window that hide the same, for masks whose alignment follows from the lengths.

    Args:
        mask_type: a name from `MASKS`.
        window: (left, right) or None.
        queries, keys: numbers of tokens.
        aligned: True if ALiBi or chunks also depend on the alignment, so that the mask type must keep it.
    """
    if mask_type not in ("none", "causal", "causal_bottom_right"):
        return mask_type, window
    shift = keys - queries if mask_type == "causal_bottom_right" else 0
    left, right = window or OPEN
    if left >= queries - 1 + shift:
        left = -1
    if right >= keys - 1 - shift:
        right = -1
    if mask_type == "causal_bottom_right":
        if queries == keys:
            mask_type = "causal"
        elif queries == 1 and left < 0 and not aligned:
            mask_type = "none"
    if mask_type != "none":
        right = -1
    return mask_type, None if (left, right) == OPEN else (left, right)


def both(mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the padding masks (of queries, of keys)."""
    return mask if isinstance(mask, tuple) else (mask, mask)


def check_mask(
    mask_type: str, mask: Mask | None, window: Window | None, shape: tuple[int, int, int, int], ragged: bool
) -> None:
    """Raise ValueError if mask, mask type, window and shape do not fit."""
    if ragged and mask_type in MASKS and mask_type.startswith("padding"):
        plain = mask_type.removeprefix("padding").removeprefix("_") or "none"
        raise ValueError(f"concatenated sequences have no padding: cu_seqlens gives their ends; give {plain!r}")
    check_type(mask_type, mask is not None)
    check_window(mask_type, window)
    for part in mask if isinstance(mask, tuple) else () if mask is None else (mask,):
        if not isinstance(part, Tensor) or part.dtype is not torch.bool:
            kind = part.dtype if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise ValueError(
                f"the mask is {kind}; a mask is a boolean tensor, True where masked out: give an additive one as `bias`"
            )
    if mask_type == "arbitrary":
        if not isinstance(mask, Tensor):
            raise ValueError("an arbitrary mask is one tensor, broadcastable to [B, H, Sq, Sk]; a pair is for padding")
        check_fits("mask", mask, shape)
    elif mask is not None:
        _check_padding(mask, shape)


def check_fits(name: str, x: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Raise ValueError unless x is a tensor that broadcasts to the scores."""
    if not isinstance(x, Tensor):
        raise ValueError(f"the {name} is a {type(x).__name__}; give a tensor that broadcasts to [B, H, Sq, Sk]")
    ours = (1,) * (4 - x.dim()) + tuple(x.shape)
    if len(ours) != 4 or any(a != 1 and a != b for a, b in zip(ours, shape, strict=True)):
        raise ValueError(
            f"the {name} has shape {list(x.shape)}, which does not broadcast to [B, H, Sq, Sk] = {list(shape)}: "
            "queries by keys, the keys last"
        )


def _check_padding(mask: Mask, shape: tuple[int, int, int, int]) -> None:
    batch, _, queries, keys = shape
    if isinstance(mask, tuple) and len(mask) != 2:
        raise ValueError(
            f"the padding mask is {len(mask)} masks; give (mask of queries, mask of keys), or one for both"
        )
    for name, tokens, length in zip(("queries", "keys"), both(mask), (queries, keys), strict=True):
        if tuple(tokens.shape) != (batch, length):
            raise ValueError(
                f"the padding mask of the {name} has shape {list(tokens.shape)}, expected [batch, {name}] = "
                f"{[batch, length]}; give (mask of queries, mask of keys) where they differ"
            )


def _four(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


# ---- AttentionCall ----


class AttentionCall(NamedTuple):
    """Options of a call besides q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""

    mask_type: str = "none"
    mask: Mask | None = None
    window: Window | None = None
    #: [1 or B, 1 or H, 1 or Sq, 1 or Sk], added to the scores; or None.
    bias: Tensor | None = None
    #: [H] or [B, H], or None.
    alibi_slopes: Tensor | None = None
    #: [H]: logits of an extra softmax column whose value is 0; or None.
    sinks: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    dropout: float = 0.0
    #: Boundaries of concatenated sequences, or None for a regular batch.
    ragged: RaggedLayout | None = None
    #: A query sees only keys in its own chunk of this many positions; None for all.
    chunk: int | None = None

    def hidden(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the mask, True where masked out, broadcastable to [B, H, Sq, Sk]; None if nothing is hidden."""
        shape = scores_shape(q, k)
        if self.mask is not None or self.ragged is not None or not _keepable(q):
            return hidden(self.mask_type, self.mask, self.window, shape, q.device, self.ragged, self.chunk)
        return _by_position(self.mask_type, self.window, self.chunk, *shape[2:], q.device, capture.stream_of(q.device))

    def runs(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return `runs_of_keys` for this call, which has no tensor mask; None if every query sees every key."""
        return runs_of_keys(self.mask_type, self.window, q.shape[2], k.shape[2], q.device, self.ragged, self.chunk)

    def whole_bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the sum of bias and ALiBi's bias, broadcastable to [B, H, Sq, Sk]; None if there is neither."""
        if self.alibi_slopes is None:
            return self.bias
        ahead = ahead_of_query(self.mask_type, self.mask, scores_shape(q, k), q.device, self.ragged)
        slopes = alibi(self.alibi_slopes, ahead)
        return slopes if self.bias is None else self.bias + slopes


def _keepable(q: Tensor) -> bool:
    """Return True if a mask created now may be cached: not traced or fake, and not filled only by a CUDA graph."""
    if is_tracing() or type(q) is not Tensor:
        return False
    return not capture.is_captured_or_rehearsed(q.device)


@lru_cache(2)
@hide_from_policies
def _by_position(
    mask_type: str,
    window: Window | None,
    chunk: int | None,
    queries: int,
    keys: int,
    device: torch.device,
    stream: int,
) -> Tensor | None:
    """Return the cached mask [1, 1, Sq, Sk] that depends only on positions; the layers of a model share it.

    Cached per stream: another stream would not wait for the kernel that fills it.
    """
    with torch.inference_mode(False):
        return hidden(mask_type, None, window, (1, 1, queries, keys), device, chunk=chunk)


def scores_shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """Return the shape of the scores (B, H, Sq, Sk)."""
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2]
