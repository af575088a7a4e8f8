"""Replace the functions by which transformers' models apply rope to queries and keys.

A model passes cosines and sines that it computes once for all layers. Here they are rearranged for `apply_rotary`, with
the sine negated at the first element of each pair.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.backends.gpu import capture
from quaver.torch.conversion.probe import differs, random_tensor
from quaver.torch.conversion.replace.fused_module import same_code
from quaver.torch.nn.attention.rope import apply_rotary_to_both
from quaver.torch.numerics.versions import has_reliable_version

#: Layouts of the tables [..., R]: each angle in both halves, at both neighbours, or once.
HALVES, PAIRS, ONCE = "halves", "pairs", "once"


class _RopeThreadState(threading.local):
    #: Weak references to the last cosines and sines, their cache key, and the tables; empty once they are freed.
    last: Sequence[Any] = ()


_thread = _RopeThreadState()


@dataclass(frozen=True)
class Rope:
    """Rope function (q [B, H, S, D], k [B, G, S, D], cos, sin [B, S, R]) that returns q and k rotated.

    With unsqueeze_dim=2, as in transformers, q and k are [B, S, H, D].
    """

    #: Layout of the tables; and True if neighbouring features form a pair, False if the two halves do.
    table_layout: str
    interleaved: bool

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        tables = self._remembered(cos, sin)
        if unsqueeze_dim == 2:
            return apply_rotary_to_both(q, k, *tables, self.interleaved)
        q, k = apply_rotary_to_both(q.transpose(1, 2), k.transpose(1, 2), *tables, self.interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)

    def _remembered(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for these tensors, cached because all layers of a model receive the same ones."""
        if not (has_reliable_version(cos) and has_reliable_version(sin)) or cos.requires_grad or sin.requires_grad:
            return self._tables(cos, sin)
        # Memory allocated in a CUDA graph is only filled during replays.
        if capture.is_captured_or_rehearsed(cos.device):
            return self._tables(cos, sin)
        stream = capture.stream_of(cos.device) if cos.is_cuda else 0
        facts = self, cos._version, sin._version, stream, torch.is_inference_mode_enabled()
        # Copy first: another thread may clear the entry.
        last = tuple(_thread.last)
        if last and last[0]() is cos and last[1]() is sin and last[2] == facts:
            cached: tuple[Tensor, Tensor] = last[3]
            return cached
        entry: list[Any] = []
        fresh = self._tables(cos, sin)
        entry += [weakref.ref(cos, lambda _: entry.clear()), weakref.ref(sin), facts, fresh]
        _thread.last = entry
        return fresh

    def _tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
        if self.table_layout == PAIRS:
            cos, sin = cos[..., ::2], sin[..., ::2]
        elif self.table_layout == HALVES:
            cos, sin = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        if self.interleaved:
            return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def tables(table_layout: str, width: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random cosines and sines [1, S, R] for R features."""
    angle = random_tensor((1, tokens, width // 2), torch.float32, 7, scale=2.0)
    if table_layout == PAIRS:
        angle = angle.repeat_interleave(2, -1)
    elif table_layout == HALVES:
        angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_half(x: Any) -> Any:
    """Rotate as transformers' function of this code, which most families share."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Apply rope as transformers' function of this code."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def rope_of(function: Callable[..., Any]) -> Rope | None:
    """Return the `Rope` that computes the same as a model's function, or None.

    It is known from the code (`_rotate`), or else the first one that `probe` finds to compute the same.
    """
    if same_code(function, _rotate):
        return Rope(HALVES, False)
    for rope in (Rope(HALVES, False), Rope(PAIRS, True), Rope(HALVES, True), Rope(ONCE, False)):
        if not _differs(function, rope, HEAD):
            # Some functions reject tables with fewer features than a head; those that accept them must agree.
            why = _differs(function, rope, HEAD // 2)
            return rope if not why or why.startswith("a small copy of it does not run") else None
    return None


#: Features of a head in the comparison.
HEAD = 16


def _differs(function: Callable[..., Any], rope: Rope, width: int) -> str:
    """Return how the function and the rope differ if `width` features of each head rotate, or ""."""

    def of(rotate: Callable[..., Any]) -> Callable[..., Tensor]:
        def rotated(_: nn.Module, q: Tensor, k: Tensor) -> Tensor:
            y, z = rotate(q, k, *tables(rope.table_layout, width, 5, q.dtype))
            return torch.cat([y, z], 1)

        return rotated

    def inputs(dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        yield tuple(random_tensor((2, heads, 5, HEAD), dtype, heads) for heads in (4, 2))

    return differs(lambda dtype: nn.Identity(), of(rope), inputs, of(function))
