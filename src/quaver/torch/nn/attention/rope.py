"""Rotary position embedding (rope): rotates pairs of a head's features by angles that grow with the position.

Source: Su et al. 2021, arXiv:2104.09864; rotating only the first features is GPT-NeoX's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.text import check_name
from quaver.torch.backends.gpu import capture
from quaver.torch.nn.attention import rope_scaling
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.numerics.versions import has_reliable_version
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.state.selective_checkpoint import hide_from_policies

# ---- positions of tokens by layout, and queries scaled by position ----

#: Number of axes of x by layout.
LAYOUTS = {"bshd": 4, "sbhd": 4, "thd": 3}


def positions_of(
    x: Tensor, layout: str, positions: Tensor | None, offset: int | Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """Return positions with the axes of x before its heads; size 1 where they are equal."""
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
    """Multiply queries [..., heads, D] by 1 + gain log(1 + floor((p + 1) / length)), in float32.

    Args:
        q: queries.
        positions: their positions p, [...].
        gain, length: constants of the formula.
    Exact: eager and compiled agree except for the logarithm's last bit. Source: Nakanishi 2025, arXiv:2501.19399.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = torch.log1p(torch.floor((positions.to(wide) + 1) / length)) * gain + 1
    return (q * factor[..., None, None]).to(q.dtype)


def _ragged(x: Tensor, positions: Tensor | None, offset: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the positions [T] of concatenated sequences."""
    tokens = x.shape[0]
    if positions is not None and positions.shape != (tokens,):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; x {tuple(x.shape)} in 'thd' needs {(tokens,)}"
        )
    several = isinstance(offset, Tensor) and offset.dim() == 1
    if cu_seqlens is None:
        if positions is None or several:
            raise ValueError(
                "layout 'thd' needs cu_seqlens with the start of each sequence, or positions of every token"
            )
        return positions + offset
    _check_lengths(cu_seqlens, tokens)
    counted = torch.arange(tokens, dtype=torch.int64, device=x.device)
    # The last start not above the token; an empty sequence shares its start with the next one.
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
    # Reading the values on a GPU would synchronize.
    if not cu_seqlens.is_cpu or is_tracing():
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise ValueError(f"cu_seqlens is {ends}; it must ascend from 0 to the number of tokens, {tokens}")


# ---- rotation of feature pairs ----
#
# Cosines and sines are stored for both elements of a pair, with the sine negated for the first, so that rotation is x *
# cos + partner(x) * sin: a few operations for any pairing, for which autograd saves only cos and sin. Under a compiler
# both tables and rotation are custom operators: Inductor's cosine, its fused multiply-add on a GPU and its skipped
# rounding to bf16 would change bits. On a GPU one kernel rotates queries and keys with the bits of the plain formula.
# Source: Su et al. 2021, arXiv:2104.09864.


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return x * cos + partner(x) * sin for the first features of x, as many as the tables have; the rest is copied.

    Args:
        x: [..., D].
        cos: float32, broadcastable to [..., rotated features]: the cosine of a pair's angle, for both elements.
        sin: the sine, negated for the first element. `RotaryEmbedding.tables` creates both.
        interleaved: True pairs neighbours (0, 1), (2, 3) ...; False pairs feature i with i + half.
    Returns:
        [..., D] in x's dtype, contiguous, computed in float32 and rounded once, also gradients.
    Exact: the bits of eager mode, also compiled.
    """
    return ROTATE(x, None, cos, sin, interleaved, False)[0]


def apply_rotary_to_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply `apply_rotary` to queries and keys with the same positions, in one launch on a GPU. Exact: the same
    bits.
    """
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        return apply_rotary(q, cos, sin, interleaved), apply_rotary(k, cos, sin, interleaved)
    q, k = ROTATE(q, k, cos, sin, interleaved, False)
    return q, k


def apply_rotary_to_parts(x: Tensor, heads: int, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Split x into q, k and v and rotate q and k, in one launch on a GPU, forward and backward.

    Args:
        x: [..., all heads, D].
        heads: number of heads of q, which come first; k and v have half of the rest each.
        cos, sin, interleaved: as for `apply_rotary`.
    """
    return ROTATE_PARTS(x, heads, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotate forward, or with `back` in the opposite direction, in plain operations that autograd and torch.func
    support.
    """
    rotary_dim = cos.shape[-1]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if rotary_dim != x.shape[-1]:
        wide = wide[..., :rotary_dim]
    if interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(rotary_dim // 2, -1)
    rotated = wide * cos
    rotated = rotated - partner * sin if back else rotated + partner * sin
    if rotary_dim != x.shape[-1]:
        return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], dim=-1).contiguous()
    rotated = rotated if x.dtype is rotated.dtype else rotated.to(x.dtype)
    return rotated.contiguous()


def _not_launched(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: Any) -> str:
    """Return why no kernel can rotate these tensors, or ""."""
    for x in (q,) if k is None else (q, k):
        if x.is_meta or type(x) is not Tensor or cos.device != x.device:
            return "the kernel takes plain tensors on one GPU"
    if cos.requires_grad or sin.requires_grad:
        return "the kernel gives cosines and sines no gradient"
    if transforms_active() or forward_level() >= 0:
        return "torch.func and forward mode see no kernel"
    return _KERNEL.reason(q, k, cos, sin)


class _FusedRotaryFunction(torch.autograd.Function):
    """Autograd function of the rotation kernel; its backward rotates gradients back with the same kernel.

    With heads=None it rotates queries and optionally keys. Otherwise it splits one tensor into q, k and v, or joins
    them.
    """

    @staticmethod
    @hide_from_policies
    def forward(
        ctx: Any, heads: int | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, *x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.constants = heads, interleaved, not back
        x = tuple(one if one is None or one.stride(-1) == 1 else one.contiguous() for one in x)
        rotated: tuple[Tensor | None, ...]
        if heads is None:
            rotated = _KERNEL.run(*x, cos, sin, interleaved, back)
        else:
            rotated = _PARTS.run(x, heads, cos, sin, interleaved)
        return rotated

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> Any:
        heads, *how = ctx.constants
        return *(None,) * 5, *_FusedRotaryFunction.apply(heads, *ctx.saved_tensors, *how, *gs)


def _plain_parts(x: Tensor, heads: int, *tables: Any) -> tuple[Tensor, ...]:
    groups = (x.shape[-2] - heads) // 2
    q, k, v = x.split((heads, groups, groups), -2)
    # Backward will need only v of x: a copy lets the rest be freed.
    return *ROTATE(q, k, *tables, False), v.contiguous() if torch.is_grad_enabled() else v


class _RotaryFunction(torch.autograd.Function):
    """Autograd function of the custom operator; its gradient is the opposite rotation."""

    @staticmethod
    @hide_from_policies
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.constants = interleaved, back
        rotated: Tensor = ROTATE.operator(x, cos, sin, interleaved, back)
        return rotated

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        interleaved, back = ctx.constants
        return ROTATE.operator(g, cos, sin, interleaved, not back), None, None, None, None


def _tables(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    frequencies = rope_scaling.parse(text)
    longest: int | Tensor = length
    if length < 0 and frequencies.by_length:
        longest = where.max() + 1 if where.numel() else 0
    angle = where.float()[..., None, None] * frequencies.at(rows.to(where.device), longest)
    cos, sin = angle.cos(), angle.sin()
    if frequencies.attention_factor != 1:
        cos, sin = cos * frequencies.attention_factor, sin * frequencies.attention_factor
    if interleaved:
        return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _plain(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor | None]:
    return _rotate(q, cos, sin, interleaved, back), None if k is None else _rotate(k, cos, sin, interleaved, back)


def _traced(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
    return _RotaryFunction.apply(q, *options), None if k is None else _RotaryFunction.apply(k, *options)


def _kernel(x: Tensor, *options: Any) -> Tensor:
    return ROTATE.eager(x, None, *options)[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _tables_fake(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    shape = (*where.shape, 1, 2 * rows.shape[1])
    return where.new_empty(shape, dtype=torch.float32), where.new_empty(shape, dtype=torch.float32)


_KERNEL = Implementation("triton", f"{ops.GPU}.norm:turn", f"{ops.GPU}.norm:reason")
_PARTS = Implementation("triton", f"{ops.GPU}.norm:turn_parts")
#: Rotate (q, k of the same tokens or None, cos, sin, interleaved, True to rotate back); returns both, rotated.
ROTATE: Operation[tuple[Tensor, ...]] = Operation(
    "turn(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    [
        Implementation(
            "triton",
            lambda q, k, *tables: _FusedRotaryFunction.apply(None, *tables, q, k),
            _not_launched,
            ops.no_kernels,
        ),
        Implementation("reference", _plain),
    ],
    fake=_fake,
    kernel=_kernel,
    traced=_traced,
)
#: Split and rotate (all heads of q, k and v, number of q's heads, cos, sin, interleaved); returns rotated q and k, and
#: v.
ROTATE_PARTS: Operation[tuple[Tensor, ...]] = Operation(
    "turn_parts",
    [
        Implementation(
            "triton",
            lambda x, heads, *tables: _FusedRotaryFunction.apply(heads, *tables, False, x),
            lambda x, _, *tables: _not_launched(x, None, *tables),
            ops.no_kernels,
        ),
        Implementation("reference", _plain_parts),
    ],
    traced=_plain_parts,
)
#: Cosines and sines float32 [..., 1, rotated features], the 1 for heads, as `apply_rotary` takes them. Arguments:
#: positions [...], `Frequencies.rows` [n, rotated features / 2], length of the longest sequence for length-dependent
#: frequencies (-1 for the largest position + 1), `Frequencies.text`, interleaved. Exact: eager's bits, also compiled.
TABLES: Operation[tuple[Tensor, Tensor]] = Operation(
    "rotary_tables(Tensor where, Tensor rows, SymInt length, str text, bool interleaved) -> (Tensor cos, Tensor sin)",
    _tables,
    fake=_tables_fake,
)


# ---- module ----

__all__ = ["RotaryEmbedding", "apply_rotary"]

#: Number of cached tables per module: a model rarely uses more than two kinds of positions in one step.
CACHED_TABLES = 4


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries or keys. No parameters and no entry in the state dict; layers may share one.

    Args:
        head_dim: D, features of a head.
        theta: base of the frequencies.
        fraction: share of the D features that rotates, the first ones; the rest is unchanged.
        interleaved: True pairs neighbours (0, 1), (2, 3) ...; False pairs feature i with i + half.
        scaling: Hugging Face's `rope_parameters`, such as {"rope_type": "yarn", "factor": 4.0, ...}; its rope_theta and
            partial_rotary_factor, if present, override theta and fraction.
        max_positions: Hugging Face's max_position_embeddings, the length used in training.
        device: of the frequencies, which stay float32 even if the model is cast.
    Raises:
        ValueError: an unknown rope_type, a missing or unknown key, or an odd number of rotated features.
    Bounded: relative RMS 1e-6 of float64 in float32, for positions whose angles float32 can represent.
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
        self._cached_tables: dict[Any, tuple[Tensor, Tensor, Any]] = {}

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        offset: int | Tensor = 0,
        layout: str = "bshd",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: [B, S, H, D] in layout "bshd", [S, B, H, D] in "sbhd", [T, H, D] in "thd".
            positions: [S] or [B, S], and [T] in thd; None counts 0, 1, 2 ..., in thd from each sequence's start.
            offset: added to the positions, an int or [B], such as the number of cached tokens.
            layout: a name in `LAYOUTS`.
            cu_seqlens: int [B + 1], for thd: start of each sequence, and T.
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
        """Return (cos, sin) for `apply_rotary`, float32, broadcastable to x; arguments as for `forward`."""
        if (
            isinstance(positions, list | tuple)
            or isinstance(offset, list | tuple)
            or isinstance(cu_seqlens, list | tuple)
        ):
            raise ValueError("positions, offset and cu_seqlens of rope are tensors (offset may be a number), not lists")
        if is_tracing() or type(x) is not Tensor or capture.is_captured_or_rehearsed(x.device):
            return self._build(x, positions, offset, layout, cu_seqlens)
        passed = positions, offset, cu_seqlens
        tensors = tuple(t for t in passed if isinstance(t, Tensor))
        if not all(type(t) is Tensor and has_reliable_version(t) for t in tensors):
            return self._build(x, positions, offset, layout, cu_seqlens)
        versions = tuple(t._version for t in tensors)
        numbers = (id(t) if isinstance(t, Tensor) else t for t in passed)
        # Another stream would not wait for the kernels that fill the tables.
        key = (x.shape[:-2], x.shape[-1], layout, x.device, capture.stream_of(x.device), versions, *numbers)
        cached = self._cached_tables.get(key)
        if cached is None:
            # Saved for backward later, so they must not be inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                fresh = hide_from_policies(self._build)(x, positions, offset, layout, cu_seqlens)
            # Keep the tensors with the entry, so that their ids are not reused.
            cached = self._cached_tables[key] = (*fresh, tensors)
            if len(self._cached_tables) > CACHED_TABLES:
                del self._cached_tables[next(iter(self._cached_tables))]
        return cached[0], cached[1]

    def _build(
        self, x: Tensor, positions: Tensor | None, offset: int | Tensor, layout: str, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, layout)
        where = positions_of(x, layout, _to(x, positions), _to(x, offset), _to(x, cu_seqlens))
        length = -1
        if positions is None and not isinstance(offset, Tensor) and layout != "thd":
            length = offset + x.shape[0 if layout == "sbhd" else 1]
        if self.inverse_frequency.is_meta and not x.is_meta:
            # A module built on meta: no checkpoint fills the frequencies, and load_state_dict(assign=True) skips them.
            self.inverse_frequency = self.frequencies.rows(x.device)
        return TABLES(where, self.inverse_frequency, length, self._text, self.interleaved)

    def _check(self, x: Tensor, layout: str) -> None:
        check_name("layout", layout, LAYOUTS)
        if x.dim() != LAYOUTS[layout] or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"rope with layout {layout!r} takes {', '.join(layout.upper())} with D = {self.head_dim}, but got "
                f"a tensor of shape {tuple(x.shape)}"
            )

    def reset_parameters(self) -> None:
        """Recompute the frequencies on their device."""
        self.inverse_frequency = self.frequencies.rows(self.inverse_frequency.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the module, but recompute the frequencies so that they are neither rounded nor uninitialized."""
        super()._apply(fn, recurse)
        self._cached_tables = {}
        self.reset_parameters()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_tables": {}}

    def extra_repr(self) -> str:
        f = self.frequencies
        scaled = "" if f.rope_type == "default" else f", {f.rope_type}"
        return f"{self.head_dim}, rotated={f.dim}, theta={f.theta:g}, interleaved={self.interleaved}{scaled}"


def _to(x: Tensor, passed: Any) -> Any:
    return passed.to(x.device) if isinstance(passed, Tensor) else passed
