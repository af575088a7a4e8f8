"""Rotary positions: pairs of a head's features turn by an angle that grows with the position.

Source: Su et al. 2021, arXiv:2104.09864; turning only the first features is GPT-NeoX's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.text.spelling import check_name
from quaver.torch.backends.gpu.launching import capture
from quaver.torch.blocks.attention.rope import stretching
from quaver.torch.blocks.attention.rope.positions import LAYOUTS, positions_of
from quaver.torch.blocks.attention.rope.rotary import TABLES, apply_rotary
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.numerics.versions import has_reliable_version
from quaver.torch.operations.selecting import unseen

__all__ = ["RotaryEmbedding", "apply_rotary"]

#: How many tables a module keeps: a model rarely turns by more than two kinds of positions in one step.
KEPT = 4


class RotaryEmbedding(nn.Module):
    """Turns queries or keys by their positions. No parameters and nothing in the state dict; layers may share one.

    Args:
        head_dim: D, the features of a head.
        theta: base of the frequencies.
        fraction: of the D features that turn, the first ones; the rest stay.
        interleaved: pairs are neighbours (0, 1), (2, 3) ...; else feature i goes with i + half.
        scaling: Hugging Face's `rope_parameters`: {"rope_type": "yarn", "factor": 4.0, ...}; its rope_theta and
            partial_rotary_factor, where given, are used instead of theta and fraction.
        max_positions: Hugging Face's max_position_embeddings, the length trained with.
        device: of the frequencies, which stay float32 whatever the model is cast to.
    Raises:
        ValueError: an unknown rope_type, a missing or unknown key, an odd number of features that would turn.
    Bounded: relative RMS 1e-6 of float64 in float32, for positions whose angles float32 holds.
    """

    inverse_frequency: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10_000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: dict[str, Any] | None = None,
        max_positions: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.interleaved = interleaved
        self.frequencies = stretching.frequencies(head_dim, theta, fraction, scaling, max_positions)
        self.register_buffer("inverse_frequency", self.frequencies.rows(device), persistent=False)
        self._text = self.frequencies.text
        self._kept: dict[Any, tuple[Tensor, Tensor, Any]] = {}

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor = 0,
        layout: str = "bshd",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Turn queries or keys.

        Args:
            x: [B, S, H, D] in layout "bshd", [S, B, H, D] in "sbhd", [T, H, D] in "thd".
            positions: [S] or [B, S], and [T] in thd; None counts 0, 1, 2 ..., in thd from each sequence's start.
            offset: added to the positions, a number or [B]: how many tokens stand before, in a cache for example.
            layout: one of `LAYOUTS`.
            cu_seqlens: int [B + 1], for thd: where each sequence begins, and T.
        Returns:
            x's shape and dtype.
        Raises:
            ValueError: shapes that do not fit.
        """
        cos, sin = self.tables(x, positions=positions, offset=offset, layout=layout, cu_seqlens=cu_seqlens)
        return apply_rotary(x, cos, sin, self.interleaved)

    def tables(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor = 0,
        layout: str = "bshd",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin) for `apply_rotary`, float32, broadcastable to x; arguments as of `forward`."""
        if (
            isinstance(positions, list | tuple)
            or isinstance(offset, list | tuple)
            or isinstance(cu_seqlens, list | tuple)
        ):
            raise ValueError("positions, offset and cu_seqlens of rope are tensors (offset may be a number), not lists")
        if is_tracing() or type(x) is not Tensor or capture.as_captured(x.device):
            return self._build(x, positions, offset, layout, cu_seqlens)
        given = positions, offset, cu_seqlens
        tensors = tuple(t for t in given if isinstance(t, Tensor))
        if not all(type(t) is Tensor and has_reliable_version(t) for t in tensors):
            return self._build(x, positions, offset, layout, cu_seqlens)
        versions = tuple(t._version for t in tensors)
        numbers = (id(t) if isinstance(t, Tensor) else t for t in given)
        # Another stream does not wait for the one that makes them.
        key = (x.shape[:-2], x.shape[-1], layout, x.device, capture.stream_of(x.device), versions, *numbers)
        kept = self._kept.get(key)
        if kept is None:
            # Saved for backward later on, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                fresh = unseen(self._build)(x, positions, offset, layout, cu_seqlens)
            # The tensors stay with the entry, so that their ids are not given to others.
            kept = self._kept[key] = (*fresh, tensors)
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return kept[0], kept[1]

    def _build(
        self, x: Tensor, positions: Tensor | None, offset: int | Tensor, layout: str, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, layout)
        where = positions_of(x, layout, _to(x, positions), _to(x, offset), _to(x, cu_seqlens))
        length = -1
        if positions is None and not isinstance(offset, Tensor) and layout != "thd":
            length = offset + x.shape[0 if layout == "sbhd" else 1]
        if self.inverse_frequency.is_meta and not x.is_meta:
            # Nothing in a checkpoint fills them, and load_state_dict(assign=True) leaves them where they were.
            self.inverse_frequency = self.frequencies.rows(x.device)
        return TABLES(where, self.inverse_frequency, length, self._text, self.interleaved)

    def _check(self, x: Tensor, layout: str) -> None:
        check_name("layout", layout, LAYOUTS)
        if x.dim() != LAYOUTS[layout] or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"rope with layout {layout!r} takes {', '.join(layout.upper())} with D = {self.head_dim}, "
                f"and got a tensor of shape {tuple(x.shape)}"
            )

    def reset_parameters(self) -> None:
        """Fill the frequencies where they are."""
        self.inverse_frequency = self.frequencies.rows(self.inverse_frequency.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move, but neither round the frequencies nor leave them uninitialized."""
        super()._apply(fn, recurse)
        self._kept = {}
        self.reset_parameters()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def extra_repr(self) -> str:
        f = self.frequencies
        scaled = "" if f.rope_type == "default" else f", {f.rope_type}"
        return f"{self.head_dim}, turning={f.dim}, theta={f.theta:g}, interleaved={self.interleaved}{scaled}"


def _to(x: Tensor, given: Any) -> Any:
    return given.to(x.device) if isinstance(given, Tensor) else given
