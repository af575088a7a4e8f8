"""Functions that turn queries and keys as transformers' models name them, computed by our rotary positions.

A model hands its function cosines and sines that are made once for all layers; here they are laid out as
`apply_rotary` reads them, a sine negative at the first place of its pair.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.blocks.attention.rope.rotary import apply_rotary_to_both
from quaver.torch.model.fusing.comparing import drawn
from quaver.torch.model.reach.same import BOUNDS, close
from quaver.torch.numerics.versions import has_reliable_version

#: How tables [..., R] lie: an angle at both halves, at both of neighbours, or once.
HALVES, PAIRS, ONCE = "halves", "pairs", "once"
#: Llama 4's, whose function takes one tensor of complex numbers; ours do not take its place.
COMPLEX = "complex"


class _Thread(threading.local):
    #: Weak references to cosines and sines, what else their tables go by, and those; nothing once they have died.
    last: Sequence[Any] = ()


_thread = _Thread()


@dataclass(frozen=True)
class Rope:
    """(q [B, H, S, D], k [B, G, S, D], cos, sin [B, S, R]) to both, rotated: what a model's function computes.

    With unsqueeze_dim=2, as there, q and k are [B, S, H, D].
    """

    #: How its tables lie, and which features are a pair.
    lies: str
    interleaved: bool

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        tables = self._remembered(cos, sin)
        if unsqueeze_dim == 2:
            return apply_rotary_to_both(q, k, *tables, self.interleaved)
        q, k = apply_rotary_to_both(q.transpose(1, 2), k.transpose(1, 2), *tables, self.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    def _remembered(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The tables of the last pair of tensors, which all layers of a model are given: made and kept once."""
        if not (has_reliable_version(cos) and has_reliable_version(sin)) or cos.requires_grad or sin.requires_grad:
            return self._tables(cos, sin)
        # What a graph allocates is filled at its replays alone.
        if capture.as_captured(cos.device):
            return self._tables(cos, sin)
        stream = capture.stream_of(cos.device) if cos.is_cuda else 0
        facts = self, cos._version, sin._version, stream, torch.is_inference_mode_enabled()
        # A copy: the entry may be cleared meanwhile, by another thread.
        last = tuple(_thread.last)
        if last and last[0]() is cos and last[1]() is sin and last[2] == facts:
            kept: tuple[Tensor, Tensor] = last[3]
            return kept
        entry: list[Any] = []
        fresh = self._tables(cos, sin)
        entry += [weakref.ref(cos, lambda _: entry.clear()), weakref.ref(sin), facts, fresh]
        _thread.last = entry
        return fresh

    def _tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
        if self.lies == PAIRS:
            cos, sin = cos[..., ::2], sin[..., ::2]
        elif self.lies == HALVES:
            cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        if self.interleaved:
            return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def tables(lies: str, width: int, tokens: int, dtype: torch.dtype) -> Any:
    """Cosines and sines [1, S, R] of made-up angles for R features, or complex numbers [1, S, R / 2]."""
    angle = drawn((1, tokens, width // 2), torch.float32, 7, scale=2.0)
    if lies == COMPLEX:
        return torch.polar(torch.ones_like(angle), angle)
    if lies == PAIRS:
        angle = angle.repeat_interleave(2, -1)
    elif lies == HALVES:
        angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rope_of(function: Callable[..., Any]) -> Rope | None:
    """What a model's function computes, if our rotary positions do."""
    with torch.inference_mode(False), torch.enable_grad():
        for rope in (Rope(HALVES, False), Rope(PAIRS, True), Rope(HALVES, True), Rope(ONCE, False)):
            if all(_agrees(function, rope, HEAD, dtype) for dtype in BOUNDS):
                # Some refuse tables of fewer features than a head's; those that do not must agree.
                return rope if _agrees(function, rope, HEAD // 2, torch.float32, refusing=True) else None
    return None


#: Features of a head.
HEAD = 16


def _agrees(function: Callable[..., Any], rope: Rope, width: int, dtype: torch.dtype, refusing: bool = False) -> bool:
    """For heads of which so many features turn.

    Args:
        refusing: the answer where the function does not run.
    """
    q, k = (drawn((2, heads, 5, HEAD), dtype, heads).requires_grad_() for heads in (4, 2))
    cos, sin = tables(rope.lies, width, 5, dtype)
    try:
        theirs = function(q, k, cos, sin)
    except Exception:
        # It takes other arguments, or other tables.
        return refusing
    results = []
    for turned in (theirs, rope(q, k, cos, sin)):
        if (
            not isinstance(turned, tuple)
            or len(turned) != 2
            or any(y.shape != x.shape for x, y in zip((q, k), turned, strict=True))
        ):
            return False
        g = [drawn(y.shape, dtype, 9) for y in turned]
        results.append([*(y.detach() for y in turned), *torch.autograd.grad(turned, (q, k), g)])
    return all(map(close, results[1], results[0]))
