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
from quaver.torch.internals import forward_mode_active, transforms_active
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Impl, Operation


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
    if transforms_active() or forward_mode_active():
        return "torch.func and forward mode see no kernel"
    return _KERNEL.reason(q, k, cos, sin)


class _Launched(torch.autograd.Function):
    """Queries, and keys if there are any, turned by the kernel; their gradients are turned back by it, and so on."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.constants = interleaved, back
        turned: tuple[Tensor, Tensor | None] = _KERNEL.run(q, k, cos, sin, interleaved, back)
        return turned

    @staticmethod
    def backward(ctx: Any, of_q: Tensor | None, of_k: Tensor | None) -> Any:
        cos, sin = ctx.saved_tensors
        interleaved, back = ctx.constants
        given = [g for g in (of_q, of_k) if g is not None]
        dense = [g if g.stride(-1) == 1 else g.contiguous() for g in given]
        turned = _Launched.apply(*(*dense, None)[:2], cos, sin, interleaved, not back) if dense else (None, None)
        of_q, of_k = turned if of_q is not None else (None, turned[0])
        return of_q, of_k, None, None, None, None


class _Turn(torch.autograd.Function):
    """The opaque turning, whose gradient is the turning back."""

    @staticmethod
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


def rotary_tables(where: Tensor, rows: Tensor, length: int, text: str, interleaved: bool) -> tuple[Tensor, Tensor]:
    """What `apply_rotary` takes.

    Args:
        where: positions [...].
        rows: `Frequencies.rows`, [n, turning / 2].
        length: of the longest sequence, for frequencies that go by it; -1 takes the largest position's.
        text: `Frequencies.text`.
        interleaved: as `apply_rotary`.
    Returns:
        (cos, sin) float32 [..., 1, turning], the 1 for the heads.
    Exact: eager's bits, compiled too.
    """
    return TABLES(where, rows, length, text, interleaved)


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
#: (q, k of the same tokens or None, cos, sin, interleaved, whether to turn back) to both, turned.
TURN: Operation[tuple[Tensor, ...]] = Operation(
    "turn(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    [Impl("triton", _Launched.apply, _not_launched, ops.no_kernels), Impl("reference", _plain)],
    fake=_fake,
    kernel=_kernel,
    traced=_traced,
)
TABLES: Operation[tuple[Tensor, Tensor]] = Operation(
    "rotary_tables(Tensor where, Tensor rows, SymInt length, str text, bool interleaved) -> (Tensor cos, Tensor sin)",
    _tables,
    fake=_tables_fake,
)
