"""Where tokens stand: the positions that rotary embeddings turn by, by layout, and queries that grow with them."""

import torch
from torch import Tensor

from quaver.torch.numerics.tracing import is_tracing

#: The layouts by name, and how many axes x has.
LAYOUTS = {"bshd": 4, "sbhd": 4, "thd": 3}


def positions_of(
    x: Tensor, layout: str, positions: Tensor | None, offset: int | Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """Positions in the axes of x before its heads, 1 where they are the same for all."""
    if layout == "thd":
        return _ragged(x, positions, offset, cu_seqlens)
    batch, tokens = x.shape[:2] if layout == "bshd" else (x.shape[1], x.shape[0])
    if cu_seqlens is not None:
        raise ValueError(f"cu_seqlens is for layout 'thd', and this is {layout!r}; leave it out")
    if positions is None:
        start = 0 if isinstance(offset, Tensor) else offset
        positions = torch.arange(start, start + tokens, dtype=torch.int64, device=x.device)
        shift: int | Tensor = offset if isinstance(offset, Tensor) else 0
    else:
        shift = offset
    if positions.shape not in ((tokens,), (batch, tokens)):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; x {tuple(x.shape)} in layout {layout!r} needs "
            f"{(tokens,)} or {(batch, tokens)}"
        )
    if isinstance(shift, Tensor) and shift.dim():
        if shift.shape != (batch,):
            raise ValueError(f"offset has shape {tuple(shift.shape)}; give a number, or one for each of {batch}")
        shift = shift[:, None]
    if isinstance(shift, Tensor) or shift:
        positions = positions + shift
    if layout == "bshd":
        return positions
    return positions.t() if positions.dim() == 2 else positions[:, None]


def tempered(q: Tensor, positions: Tensor, gain: float, length: int) -> Tensor:
    """Queries [..., heads, D] times 1 + gain log(1 + floor((p + 1) / length)), p their positions [...], in float32.

    Exact: eager and compiled alike but for the logarithm's last bit. Source: Nakanishi 2025, arXiv:2501.19399.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = torch.log1p(torch.floor((positions.to(wide) + 1) / length)) * gain + 1
    return (q * factor[..., None, None]).to(q.dtype)


def _ragged(x: Tensor, positions: Tensor | None, offset: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Positions [T] of sequences one after the other."""
    tokens = x.shape[0]
    if positions is not None and positions.shape != (tokens,):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; x {tuple(x.shape)} in 'thd' needs {(tokens,)}"
        )
    several = isinstance(offset, Tensor) and offset.dim() == 1
    if cu_seqlens is None:
        if positions is None or several:
            raise ValueError("layout 'thd' needs cu_seqlens, where each sequence begins; or positions of every token")
        return positions + offset
    _check_lengths(cu_seqlens, tokens)
    counted = torch.arange(tokens, dtype=torch.int64, device=x.device)
    # The last start that is not above the token; empty sequences share theirs with the next.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), counted, right=True)
    if positions is None:
        positions = counted - cu_seqlens[sequence]
    if several:
        assert isinstance(offset, Tensor)
        if offset.shape[0] != cu_seqlens.shape[0] - 1:
            raise ValueError(f"offset has {offset.shape[0]} numbers for {cu_seqlens.shape[0] - 1} sequences; one each")
        return positions + offset[sequence]
    return positions + offset


def _check_lengths(cu_seqlens: Tensor, tokens: int) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}; give int [sequences + 1]"
        )
    # Reading them on a GPU would wait for it.
    if not cu_seqlens.is_cpu or is_tracing():
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(f"cu_seqlens is {ends}; it must ascend from 0 to the number of tokens, {tokens}")
