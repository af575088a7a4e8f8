"""Gradients between backward and step, in fewer bits than float32.

In bfloat16 they are `p.grad`, by `Tensor.grad_dtype`. In eight bits a hook takes `p.grad` away as soon as it is whole,
and keeps codes and scales. `p.grad` is None then, and torch.nn.utils.clip_grad_norm_ sees nothing and returns 0: the
optimizer's own `clip_grad_norm_` takes its place.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim import codes
from quaver.torch.optim.stepping import layout

#: By a parameter's identity: what takes its gradients. A handle of a parameter that is gone removes nothing.
_takers: dict[int, Any] = {}
#: Elements that are decoded at once where the norm is taken.
PIECE = 1 << 16


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
        rows = max(PIECE // max(data[0].numel(), 1), 1)
        for at in range(0, data.shape[0], rows):
            yield codes.decode(data[at : at + rows], scale[at : at + rows], self.spec)


def _forget(parameter: int, handle: Any) -> None:
    """Remove what took a parameter's gradients, once its optimizer is gone."""
    handle.remove()
    if _takers.get(parameter) is handle:
        del _takers[parameter]


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
        """Have a parameter's gradients kept in a dtype, by its name, or in codes."""
        if isinstance(kind, StateSpec):
            self._watch(p, kind)
        elif kind == "bfloat16" and p.dtype is not torch.bfloat16 and layout.local(p) is p and p.grad is None:
            p.grad_dtype = torch.bfloat16

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
            if owner is None or owner.accumulating:
                return
            if spec is not None and parameter.grad is not None:
                owner._take(parameter, spec)
            if owner.arrived is not None:
                owner.arrived(parameter)

        self._watched.add(p)
        # The optimizer that was made last has a parameter's gradients: one that was dropped may not be collected yet.
        before = _takers.pop(id(p), None)
        if before is not None:
            before.remove()
        handle = _takers[id(p)] = p.register_post_accumulate_grad_hook(whole)
        weakref.finalize(self, _forget, id(p), handle)

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
        if p in self.held:
            raise RuntimeError(
                f"a gradient of shape {tuple(p.shape)} came while one in {spec.text} was held, and eight bits do not "
                "add up; call zero_grad() after each step, and run all micro-batches of a step but its last inside of "
                "`with optimizer.accumulating():`"
            )
        assert p.grad is not None
        gradient = layout.local(p.grad).float()
        data, scale = codes.encode(gradient, spec)
        assert scale is not None
        self.held[p] = Held(data, scale, spec)
        p.grad = None

    def clip(self, parameters: Iterable[Tensor], largest: float, order: float) -> Tensor:
        """Multiply gradients so that their norm is at most `largest`; returns the norm before, float32 []."""
        parameters = [p for p in parameters if p.grad is not None or p in self.held]
        norm = self.norm(parameters, order)
        # Where one of them is NaN the others stay: then it can be told which.
        factor = (largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        for p in parameters:
            held = self.held.get(p)
            if held is None:
                assert p.grad is not None
                p.grad.mul_(factor.to(p.grad.device))
            else:
                held.factor = factor if held.factor is None else held.factor * factor
        return norm

    def norm(self, parameters: Iterable[Tensor], order: float = 2.0) -> Tensor:
        """The norm of gradients, as the step will see them: float32 []."""
        norms = []
        for p in parameters:
            held = self.held.get(p)
            if held is None:
                assert p.grad is not None
                norms.append(torch.linalg.vector_norm(layout.local(p.grad), order, dtype=torch.float32))
            else:
                parts = [torch.linalg.vector_norm(piece, order) for piece in held.in_pieces()]
                whole = torch.linalg.vector_norm(torch.stack(parts), order) if parts else held.codes.new_zeros(())
                norms.append(whole if held.factor is None else whole * held.factor)
        if not norms:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
