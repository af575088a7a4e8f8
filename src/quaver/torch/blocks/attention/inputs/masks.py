"""Which query may not see which key. **True in a mask means masked out**, here and everywhere.

Everything is tensor arithmetic on positions: no branch looks at a value, so that a compiler traces it.
"""

import torch
from torch import Tensor

from quaver.core.reference.masks import MASKS, check_type, check_window
from quaver.torch.blocks.attention.inputs.layout import Ragged

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
    ragged: Ragged | None = None,
    chunk: int | None = None,
) -> Tensor | None:
    """True where a query may not see a key.

    Args:
        mask_type: a name from `MASKS`.
        mask: True where masked out. Padding: [B, Sk] that serves queries and keys, or ([B, Sq], [B, Sk]). Arbitrary:
            broadcastable to [B, H, Sq, Sk].
        window: (left, right): a query sees that many keys before and after its own position, -1 for all.
        shape: of the scores, (B, H, Sq, Sk).
        device: of what is returned.
        ragged: where the sequences lie that the tokens of a batch of one are made of.
        chunk: a query sees keys of its own run of so many positions alone; None for all.
    Returns:
        Boolean, broadcastable to [B, H, Sq, Sk]; None where nothing is hidden.
    """
    parts: list[Tensor] = []
    if mask_type == "arbitrary":
        assert isinstance(mask, Tensor)
        parts.append(_four(mask))
    elif mask is not None:
        of_queries, of_keys = both(mask)
        parts += [of_queries[:, None, :, None], of_keys[:, None, None, :]]
    if ragged is not None:
        of_queries, of_keys = ragged.sequence_of_tokens(shape[2], shape[3], device)
        parts.append((of_queries[:, None] != of_keys)[None, None])
    left, right = bounds(mask_type, window)
    if left >= 0 or right >= 0 or chunk is not None:
        ahead = ahead_of_query(mask_type, mask, shape, device, ragged)
        if right >= 0:
            parts.append(ahead > right)
        if left >= 0:
            parts.append(ahead < -left)
        if chunk is not None:
            of_keys = positions_of_keys(mask_type, mask, shape, device, ragged)
            parts.append(of_keys // chunk != (of_keys - ahead) // chunk)
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
    ragged: Ragged | None = None,
    chunk: int | None = None,
) -> Tensor | None:
    """int32 [2, Sq]: the first key that each query sees, and one past the last, where no tensor masks; None for all.

    Neither falls from one query to the next; a query whose two are equal sees nothing.
    """
    left, right = bounds(mask_type, window)
    bottom_right = mask_type.endswith("bottom_right")
    if ragged is not None:
        where, _ = ragged.positions(queries, keys, bottom_right, device)
        sequence, _ = ragged.sequence_of_tokens(queries, keys, device)
        ends = ragged.of_keys.to(device)
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
    """`hidden` of `runs_of_keys`, [1, 1, Sq, Sk]."""
    every = torch.arange(keys, dtype=torch.int32, device=runs.device)
    return ((every < runs[0][:, None]) | (every >= runs[1][:, None]))[None, None]


def ahead_of_query(
    mask_type: str,
    mask: Mask | None,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None = None,
    ragged: Ragged | None = None,
) -> Tensor:
    """How many positions each key lies after each query, [B or 1, 1, Sq, Sk], as the mask type aligns them.

    Top left, query 0 stands at key 0; bottom right, the last query stands at the last key, padding not counted.
    """
    _, _, queries, keys = shape
    bottom_right = mask_type.endswith("bottom_right")
    if ragged is not None:
        of_queries, of_keys = ragged.positions(queries, keys, bottom_right, device)
        return (of_keys - of_queries[:, None])[None, None]
    of_keys, of_queries = (torch.arange(n, dtype=torch.int64, device=device) for n in (keys, queries))
    ahead = of_keys - of_queries[:, None]
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
    ragged: Ragged | None = None,
) -> Tensor:
    """Where keys stand, counted from the first one that is no padding, [B or 1, 1, 1, Sk]: chunks begin by it."""
    if ragged is not None:
        return ragged.positions(shape[2], shape[3], False, device)[1][None, None, None]
    every = torch.arange(shape[3], dtype=torch.int64, device=device)
    if mask is None or mask_type == "arbitrary":
        return every[None, None, None]
    return (every - leading_padding(mask)[:, None])[:, None, None]


def leading_padding(mask: Mask) -> Tensor:
    """How many keys before the first real one are padding, int64 [B]."""
    return both(mask)[1].long().cumprod(-1).sum(-1)


def alibi(slopes: Tensor, ahead: Tensor) -> Tensor:
    """float32 -slope × distance, [B or 1, H, Sq, Sk], of slopes [H] or [B, H]."""
    return -slopes.float().reshape(-1, slopes.shape[-1], 1, 1) * ahead.abs()


def bounds(mask_type: str, window: Window | None) -> Window:
    """The window with what a causal mask hides: nothing ahead."""
    left, right = window or OPEN
    return (left, 0) if MASKS[mask_type][1] else (left, right)


def simplify(
    mask_type: str, window: Window | None, queries: int, keys: int, aligned: bool = False
) -> tuple[str, Window | None]:
    """The plainest mask type and window that hide the same, for masks whose alignment is known by the lengths.

    Args:
        aligned: something else, ALiBi or chunks, goes by positions too: the mask type still has to say how they align.
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
    """The padding (of queries, of keys)."""
    return mask if isinstance(mask, tuple) else (mask, mask)


def check_mask(
    mask_type: str, mask: Mask | None, window: Window | None, shape: tuple[int, int, int, int], ragged: bool
) -> None:
    """Raise a ValueError that says what does not fit."""
    if ragged and mask_type in MASKS and mask_type.startswith("padding"):
        plain = mask_type.removeprefix("padding").removeprefix("_") or "none"
        raise ValueError(f"ragged tokens have no padding: cu_seqlens says where sequences end; give {plain!r}")
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


def check_chunk(chunk: int | None) -> None:
    """Raise a ValueError unless it is a number of positions, or None."""
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}; give a number of positions above 0, or None for one chunk")


def check_fits(name: str, x: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Raise unless x is a tensor that broadcasts to the scores."""
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
