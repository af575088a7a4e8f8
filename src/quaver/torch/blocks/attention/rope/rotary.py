"""Turning pairs of features by angles, as plain functions of tensors.

Cosines and sines stand at both places of their pair, a sine negative at the first one, so that turning is
x * cos + partner(x) * sin: a few operations whatever the pairs are, of which autograd keeps cos and sin alone.
Compiled, both the tables and the turning are opaque operators: Inductor's cosine, its fused multiply-add on a GPU and
its skipped rounding to bf16 would give other bits than eager mode. On a GPU one kernel turns queries and keys, with the
bits of the plain formula.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.attention.rope import stretching
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import forward_level, transforms_active
from quaver.torch.operations.operation import Impl, Operation
from quaver.torch.operations.selecting import unseen


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x * cos + partner(x) * sin for the first features of x, as many as the tables have; the rest stay.

    Args:
        x: [..., D].
        cos: float32, broadcastable to [..., turning]: the cosine of a pair's angle, at both of its places.
        sin: the same of the sine, negative at the first place. `RotaryEmbedding.tables` makes both.
        interleaved: pairs are neighbours (0, 1), (2, 3) ...; else feature i goes with i + turning / 2.
    Returns:
        [..., D] in x's dtype, contiguous, computed in float32 and rounded once, gradients too.
    Exact: the bits of eager mode, compiled too.
    """
    return TURN(x, None, cos, sin, interleaved, False)[0]


def apply_rotary_to_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` of queries and keys that stand at the same positions: one launch on a GPU. Exact: its bits."""
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        return apply_rotary(q, cos, sin, interleaved), apply_rotary(k, cos, sin, interleaved)
    q, k = TURN(q, k, cos, sin, interleaved, False)
    return q, k


def apply_rotary_to_parts(x: Tensor, heads: int, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """q and k, turned as by `apply_rotary`, and v, of x [..., all their heads, D]: one launch on a GPU, there and back.

    Args:
        heads: those of q, which come first; k and v have half of the others each.
    """
    return TURN_PARTS(x, heads, cos, sin, interleaved)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """One way or back. Plain operations: autograd, torch.func and double backward follow them."""
    turning = cos.shape[-1]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if turning != x.shape[-1]:
        wide = wide[..., :turning]
    if interleaved:
        partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = wide.roll(turning // 2, -1)
    turned = wide * cos
    turned = turned - partner * sin if back else turned + partner * sin
    if turning != x.shape[-1]:
        return torch.cat([turned.to(x.dtype), x[..., turning:]], dim=-1).contiguous()
    turned = turned if x.dtype is turned.dtype else turned.to(x.dtype)
    return turned.contiguous()


def _not_launched(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *_: Any) -> str:
    """Why no kernel turns these where kernels run, or ""."""
    for x in (q,) if k is None else (q, k):
        if x.is_meta or type(x) is not Tensor or cos.device != x.device:
            return "the kernel takes plain tensors on one GPU"
    if cos.requires_grad or sin.requires_grad:
        return "the kernel gives cosines and sines no gradient"
    if transforms_active() or forward_level() >= 0:
        return "torch.func and forward mode see no kernel"
    return _KERNEL.reason(q, k, cos, sin)


class _Launched(torch.autograd.Function):
    """Heads turned by the kernel, whose gradients are turned back by it, and so on: queries, and keys if there are any;
    or, if it is said how many heads are q's, one tensor to q, k and v, or those back to it."""

    @staticmethod
    @unseen
    def forward(
        ctx: Any, heads: int | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, *x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.constants = heads, interleaved, not back
        x = tuple(one if one is None or one.stride(-1) == 1 else one.contiguous() for one in x)
        turned: tuple[Tensor | None, ...]
        if heads is None:
            turned = _KERNEL.run(*x, cos, sin, interleaved, back)
        else:
            turned = _PARTS.run(x, heads, cos, sin, interleaved)
        return turned

    @staticmethod
    def backward(ctx: Any, *gs: Tensor | None) -> Any:
        heads, *how = ctx.constants
        return *(None,) * 5, *_Launched.apply(heads, *ctx.saved_tensors, *how, *gs)


def _plain_parts(x: Tensor, heads: int, *tables: Any) -> tuple[Tensor, ...]:
    groups = (x.shape[-2] - heads) // 2
    q, k, v = x.split((heads, groups, groups), -2)
    # Of x backward will need v alone: a copy lets the rest go.
    return *TURN(q, k, *tables, False), v.contiguous() if torch.is_grad_enabled() else v


class _Turn(torch.autograd.Function):
    """The opaque turning, whose gradient is the turning back."""

    @staticmethod
    @unseen
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.constants = interleaved, back
        turned: Tensor = TURN.operator(x, cos, sin, interleaved, back)
        return turned

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        interleaved, back = ctx.constants
        return TURN.operator(g, cos, sin, interleaved, not back), None, None, None, None


def _tables(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    frequencies = stretching.parse(text)
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
    return _turn(q, cos, sin, interleaved, back), None if k is None else _turn(k, cos, sin, interleaved, back)


def _traced(q: Tensor, k: Tensor | None, *options: Any) -> tuple[Tensor, Tensor | None]:
    return _Turn.apply(q, *options), None if k is None else _Turn.apply(k, *options)


def _kernel(x: Tensor, *options: Any) -> Tensor:
    return TURN.eager(x, None, *options)[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _tables_fake(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    shape = (*where.shape, 1, 2 * rows.shape[1])
    return where.new_empty(shape, dtype=torch.float32), where.new_empty(shape, dtype=torch.float32)


_KERNEL = Impl("triton", f"{ops.GPU}.fused.rope:turn", f"{ops.GPU}.fused.rope:reason")
_PARTS = Impl("triton", f"{ops.GPU}.fused.rope:turn_parts")
#: (q, k of the same tokens or None, cos, sin, interleaved, whether to turn back) to both, turned.
TURN: Operation[tuple[Tensor, ...]] = Operation(
    "turn(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    [
        Impl("triton", lambda q, k, *tables: _Launched.apply(None, *tables, q, k), _not_launched, ops.no_kernels),
        Impl("reference", _plain),
    ],
    fake=_fake,
    kernel=_kernel,
    traced=_traced,
)
#: (all heads of q, k and v, how many are q's, cos, sin, interleaved) to q and k, turned, and v.
TURN_PARTS: Operation[tuple[Tensor, ...]] = Operation(
    "turn_parts",
    [
        Impl(
            "triton",
            lambda x, heads, *tables: _Launched.apply(heads, *tables, False, x),
            lambda x, _, *tables: _not_launched(x, None, *tables),
            ops.no_kernels,
        ),
        Impl("reference", _plain_parts),
    ],
    traced=_plain_parts,
)
#: (positions [...], `Frequencies.rows` [n, turning / 2], the length of the longest sequence for frequencies that go by
#: it or -1 to take the largest position's, `Frequencies.text`, interleaved as `apply_rotary`) to what that takes: cos
#: and sin float32 [..., 1, turning], the 1 for the heads. Exact: eager's bits, compiled too.
TABLES: Operation[tuple[Tensor, Tensor]] = Operation(
    "rotary_tables(Tensor where, Tensor rows, SymInt length, str text, bool interleaved) -> (Tensor cos, Tensor sin)",
    _tables,
    fake=_tables_fake,
)
