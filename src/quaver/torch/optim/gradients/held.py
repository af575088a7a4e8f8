"""Gradients between backward and step, in fewer bits than float32.

In bfloat16 they are `p.grad`, by `Tensor.grad_dtype`. In eight bits a hook takes `p.grad` away as soon as it is whole,
and keeps codes and scales. `p.grad` is None then, and torch.nn.utils.clip_grad_norm_ sees nothing and returns 0: the
optimizer's own `clip_grad_norm_` takes its place.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim import codes
from quaver.torch.optim.refusals import check_gradient
from quaver.torch.optim.stepping import layout

#: By a parameter's identity: what an optimizer changed about its gradients. One of a parameter that is gone removes
#: nothing.
_takers: dict[int, list[Any]] = {}
#: torch 2.13 has given it this name, and warns of the earlier one.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: Elements that are encoded at once, and decoded where the norm is taken: on a CPU, and where launches cost more.
PIECE, LAUNCHED = 1 << 16, 1 << 22


@dataclass
class Held:
    """A gradient in codes."""

    codes: Tensor
    scale: Tensor
    spec: StateSpec
    #: What it is multiplied by at the step, float32 []: clipping is exact.
    factor: Tensor | None = None

    def in_pieces(self) -> Iterable[Tensor]:
        """Its values, float32, some rows at a time."""
        data, scale = self.codes, self.scale
        if data.dim() < 2 or self.spec.block is None:
            yield codes.decode(data, scale, self.spec)
            return
        rows = max(PIECE // max(prod(data.shape[1:]), 1), 1)
        for at in range(0, data.shape[0], rows):
            yield codes.decode(data[at : at + rows], scale[at : at + rows], self.spec)


class _Narrow:
    """Gradients of another dtype than their parameter."""

    def __init__(self, p: Tensor, dtype: torch.dtype) -> None:
        self._p, self._before = weakref.ref(p), p.grad_dtype
        p.grad_dtype = dtype

    def remove(self) -> None:
        """Have them of the dtype that they had before, unless there is one."""
        p = self._p()
        if p is not None and p.grad is None:
            p.grad_dtype = self._before


def _forget(parameter: int, taker: Any) -> None:
    """Remove what an optimizer changed about a parameter's gradients, once it is gone."""
    taker.remove()
    own = _takers.get(parameter, [])
    if taker in own:
        own.remove(taker)
    if not own:
        _takers.pop(parameter, None)


class Gradients:
    """The gradients of an optimizer's parameters that are no `p.grad`."""

    def __init__(self) -> None:
        self.held: dict[Tensor, Held] = {}
        #: Whether more micro-batches come, in which gradients add up as `p.grad`.
        self.accumulating = False
        #: Called with a parameter whose gradient is whole.
        self.arrived: Callable[[Tensor], None] | None = None
        self._watched: set[Tensor] = set()

    def prepare(self, p: Tensor, kind: str | StateSpec) -> None:
        """Have a parameter's gradients kept in a dtype, by its name, or in codes.

        The optimizer that was made last has them: one that was dropped may not be collected yet.
        """
        for taker in _takers.pop(id(p), []):
            taker.remove()
        if isinstance(kind, StateSpec):
            self._watch(p, kind)
        elif kind == "bfloat16" and p.dtype is not torch.bfloat16 and layout.local(p) is p and p.grad is None:
            self._own(p, _Narrow(p, torch.bfloat16))

    def _own(self, p: Tensor, taker: Any) -> None:
        """Have what was changed about a parameter's gradients end with their optimizer."""
        _takers.setdefault(id(p), []).append(taker)
        weakref.finalize(self, _forget, id(p), taker)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Have `arrived` called for parameters whose gradients are floats too."""
        for p in parameters:
            if p not in self._watched:
                self._watch(p, None)

    def _watch(self, p: Tensor, spec: StateSpec | None) -> None:
        if not p.requires_grad:
            return
        gradients = weakref.ref(self)

        def whole(parameter: Tensor) -> None:
            owner = gradients()
            if owner is None:
                return
            if parameter in owner.held:
                refuse_second(parameter, owner.held[parameter].spec)
            if owner.accumulating:
                return
            if spec is not None and parameter.grad is not None:
                owner._take(parameter, spec)
            if owner.arrived is not None:
                owner.arrived(parameter)

        self._watched.add(p)
        self._own(p, p.register_post_accumulate_grad_hook(whole))

    def finite(self, p: Tensor) -> Tensor:
        """Whether a parameter's gradient is: bool []. Codes of a block that is not have the scale NaN."""
        held = self.held.get(p)
        if held is not None:
            return held.scale.isfinite().all()
        assert p.grad is not None
        gradient = layout.local(p.grad)
        return (gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all()

    @torch.no_grad()
    def _take(self, p: Tensor, spec: StateSpec) -> None:
        """Put codes in the place of `p.grad`."""
        check_gradient(p)
        assert p.grad is not None
        self.held[p] = Held(*encoded(layout.local(p.grad), spec), spec)
        p.grad = None

    def clip(self, parameters: Iterable[Tensor], largest: float, order: float) -> Tensor:
        """Multiply gradients so that their norm is at most `largest`; returns the norm before, float32 []."""
        parameters = list(parameters)
        norm = self.norm(parameters, order)
        self.hold_to(parameters, largest, norm)
        return norm

    @torch.no_grad()
    def hold_to(self, parameters: Iterable[Tensor], largest: float, norm: Tensor) -> None:
        """Multiply gradients by what brings `norm`, float32 [], to at most `largest`."""
        parameters = [p for p in parameters if p.grad is not None or p in self.held]
        # Where one of them is NaN the others stay: then it can be told which.
        factor = (largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        for p in parameters:
            held = self.held.get(p)
            if held is None:
                assert p.grad is not None
                layout.local(p.grad).mul_(factor.to(p.grad.device))
            else:
                # Of float64, or of one element along a dimension, where `largest` was a tensor: a program reads bits.
                own = factor.float().reshape(())
                held.factor = own if held.factor is None else held.factor * own

    def norm(self, parameters: Iterable[Tensor], order: float = 2.0) -> Tensor:
        """The norm of gradients, as the step will see them, of all ranks' parts: float32 [], the same on all ranks.

        Args:
            parameters: those without a gradient count nothing; ranks that divide them have the same in one order.
        """
        # By the process groups that divide a parameter: all ranks have the same, whatever gradients they have.
        norms: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:
            own = norms.setdefault(layout.groups(p), [])
            held = self.held.get(p)
            if held is not None:
                parts = [_norm(piece, order) for piece in held.in_pieces()]
                whole = torch.linalg.vector_norm(torch.stack(parts), order) if parts else _nothing(p)
                own.append(whole if held.factor is None else whole * held.factor)
            elif p.grad is not None:
                own.append(_norm(layout.gradient(p), order))
            elif not own:
                own.append(_nothing(p))
        sums = []
        for groups, own in norms.items():
            total = torch.linalg.vector_norm(torch.stack([norm.to(own[0].device) for norm in own]), order)
            for group in groups:
                every = total.new_empty(dist.get_world_size(group))
                all_gather(every, total.reshape(1), group)
                # Summed by every rank alike: the bits of a reduction may differ.
                total = torch.linalg.vector_norm(every, order)
            sums.append(total)
        if not sums:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        return torch.linalg.vector_norm(torch.stack([each.to(sums[0].device) for each in sums]), order)


def encoded(gradient: Tensor, spec: StateSpec) -> tuple[Tensor, Tensor]:
    """Codes and scales of a gradient [..., K], some rows at a time: what that needs besides is as large as a piece.

    Exact: the bits of all rows at once.
    """
    size, count = PIECE if gradient.is_cpu else LAUNCHED, gradient.numel()
    if gradient.dim() < 2 or count <= size:
        data, scale = codes.encode(gradient.float(), spec)
        assert scale is not None
        # Of rows that are no whole blocks codes lie among what filled these.
        return data.contiguous(), scale
    pieces = gradient.flatten(0, -2).split(max(size // gradient.shape[-1], 1))
    top = None
    if spec.block is None:
        top = torch.stack([codes.block_amax(piece.float(), None) for piece in pieces]).amax(0)
    data = torch.empty(gradient.shape, dtype=codes.code_dtype(spec.of), device=gradient.device)
    shape = codes.scale_shape(gradient.shape, spec.block, spec.of.numbers)
    scales = torch.empty(shape, dtype=codes.SCALE_DTYPES[spec.scale], device=gradient.device)
    at = 0
    for piece in pieces:
        own, scale = codes.encode(piece.float(), spec, amax=top)
        assert scale is not None
        rows = slice(at, at + piece.shape[0])
        data.flatten(0, -2)[rows] = own
        if spec.block is None:
            scales.copy_(scale)
        else:
            scales.flatten(0, -2)[rows] = scale
        at = rows.stop
    return data, scales


def refuse_second(p: Tensor, spec: StateSpec) -> None:
    """Raises: RuntimeError, always."""
    raise RuntimeError(
        f"a gradient of shape {tuple(p.shape)} came while one in {spec.text} was held, and eight bits do not "
        "add up; call zero_grad() after each step, and run all micro-batches of a step but its last inside of "
        "`with optimizer.accumulating():`"
    )


def _norm(x: Tensor, order: float) -> Tensor:
    # Of nothing, as a rank without rows has it, torch has no largest.
    return torch.linalg.vector_norm(x if x.numel() else x.new_zeros(1), order, dtype=torch.float32)


def _nothing(p: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=p.device)
