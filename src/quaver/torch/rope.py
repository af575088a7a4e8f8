"""Rotary positions: pairs of a head's features turn by an angle that grows with the position.

Cosines and sines stand at both places of their pair, a sine negative at the first one, so that turning is
x * cos + partner(x) * sin: a few operations whatever the pairs are, of which autograd keeps cos and sin alone.
Compiled, both the tables and the turning are opaque operators: Inductor's cosine, its fused multiply-add on a GPU and
its skipped rounding to bf16 would give other bits than eager mode.

Source: Su et al. 2021, arXiv:2104.09864; turning only the first features is GPT-NeoX's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.suggest import suggest
from quaver.torch import rope_scaling
from quaver.torch.rope_scaling import Frequencies

LAYOUTS = {"bshd": 4, "sbhd": 4, "thd": 3}
#: How many tables a module keeps: a model rarely turns by more than two kinds of positions in one step.
KEPT = 4


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x * cos + partner(x) * sin for the first features of x, as many as the tables have; the rest stay.

    Args:
        x: [..., D].
        cos: float32, broadcastable to [..., turning]: the cosine of a pair's angle, at both of its places.
        sin: the same of the sine, negative at the first place. `RotaryEmbedding.tables` makes both.
        interleaved: pairs are neighbours (0, 1), (2, 3) ...; else feature i goes with i + turning / 2.
    Returns:
        [..., D] in x's dtype, computed in float32 and rounded once, gradients too.
    Exact: the bits of eager mode, compiled too.
    """
    if torch.compiler.is_compiling():
        turned: Tensor = _Turn.apply(x, cos, sin, interleaved, False)
        return turned
    return _turn(x, cos, sin, interleaved, False)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """One way or back. Plain operations: autograd, torch.func and double backward follow them."""
    turning = cos.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    if turning != x.shape[-1]:
        wide = wide[..., :turning]
    if interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(turning // 2, -1)
    turned = wide * cos
    turned = turned - partner * sin if back else turned + partner * sin
    if turning != x.shape[-1]:
        return torch.cat([turned.to(x.dtype), x[..., turning:]], dim=-1)
    return turned if x.dtype is turned.dtype else turned.to(x.dtype)


class _Turn(torch.autograd.Function):
    """The opaque turning, whose gradient is the turning back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.about = interleaved, back
        turned: Tensor = torch.ops.quaver.turn(x, cos, sin, interleaved, back)
        return turned

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        interleaved, back = ctx.about
        return torch.ops.quaver.turn(g, cos, sin, interleaved, not back), None, None, None, None


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
        self.frequencies = rope_scaling.frequencies(head_dim, theta, fraction, scaling, max_positions)
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
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return self._made(x, positions, offset, layout, cu_seqlens)
        given = positions, offset, cu_seqlens
        tensors = tuple(t for t in given if isinstance(t, Tensor))
        if tensors and _unkeepable(tensors):
            return self._made(x, positions, offset, layout, cu_seqlens)
        versions = tuple(t._version for t in tensors)
        key = (x.shape, layout, x.device, versions, *(id(t) if isinstance(t, Tensor) else t for t in given))
        found = self._kept.get(key)
        if found is None:
            # Saved for backward later on, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                made = self._made(x, positions, offset, layout, cu_seqlens)
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return made
            # The tensors stay with the entry, so that their ids are not given to others.
            found = self._kept[key] = (*made, tensors)
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return found[0], found[1]

    def _made(
        self, x: Tensor, positions: Tensor | None, offset: int | Tensor, layout: str, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, layout)
        where = _positions(x, positions, offset, layout, cu_seqlens)
        length = -1
        if positions is None and not isinstance(offset, Tensor) and layout != "thd":
            length = offset + x.shape[0 if layout == "sbhd" else 1]
        if torch.compiler.is_compiling():
            made: tuple[Tensor, Tensor] = torch.ops.quaver.rotary_tables(
                where, self.inverse_frequency, length, self._text, self.interleaved
            )
            return made
        return _tables(where, self.inverse_frequency.to(x.device), length, self.frequencies, self.interleaved)

    def _check(self, x: Tensor, layout: str) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}; {suggest(layout, LAYOUTS)}")
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


def _unkeepable(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a change of these could go unseen: inference tensors have no version, and a graph replays new values."""
    if any(type(t) is not Tensor or t.is_inference() for t in tensors):
        return True
    return tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _positions(
    x: Tensor, positions: Tensor | None, offset: int | Tensor, layout: str, cu_seqlens: Tensor | None
) -> Tensor:
    """Positions in the axes of x before its heads, 1 where they are the same for all."""
    if layout == "thd":
        return _ragged(x, positions, offset, cu_seqlens)
    batch, tokens = x.shape[:2] if layout == "bshd" else (x.shape[1], x.shape[0])
    if cu_seqlens is not None:
        raise ValueError(f"cu_seqlens is for layout 'thd', and this is {layout!r}; leave it out")
    if positions is None:
        start = 0 if isinstance(offset, Tensor) else offset
        positions = torch.arange(start, start + tokens, device=x.device)
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
    counted = torch.arange(tokens, device=x.device)
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
    if not cu_seqlens.is_cpu or torch.compiler.is_compiling():
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(f"cu_seqlens is {ends}; it must ascend from 0 to the number of tokens, {tokens}")


def _tables(
    where: Tensor, rows: Tensor, length: int, frequencies: Frequencies, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """(cos, sin) float32 [..., 1, turning] of positions [...]; length -1 is the largest position's."""
    longest: int | Tensor = length
    if length < 0 and frequencies.by_length:
        longest = where.max() + 1 if where.numel() else 0
    angle = where.float()[..., None, None] * frequencies.at(rows, longest)
    cos, sin = angle.cos(), angle.sin()
    if frequencies.attention_factor != 1:
        cos, sin = cos * frequencies.attention_factor, sin * frequencies.attention_factor
    if interleaved:
        return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


# The opaque operators of compiled code.

_library = torch.library.Library("quaver", "FRAGMENT")
_library.define("turn(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor")
_library.define(
    "rotary_tables(Tensor where, Tensor rows, SymInt length, str text, bool interleaved) -> (Tensor cos, Tensor sin)"
)


def _turn_impl(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return _turn(x, cos, sin, interleaved, back).contiguous()


def _turn_fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _tables_impl(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _tables(where, rows.to(where.device), length, rope_scaling.parse(text), interleaved)


def _tables_fake(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    shape = (*where.shape, 1, 2 * rows.shape[1])
    return where.new_empty(shape, dtype=torch.float32), where.new_empty(shape, dtype=torch.float32)


for _name, _impl, _fake in (("turn", _turn_impl, _turn_fake), ("rotary_tables", _tables_impl, _tables_fake)):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{_name}", _fake, lib=_library)
