"""Gradients between backward and step, in fewer bits than float32.

A hook puts a `QuantizedGradient` in the place of `p.grad` as soon as that is whole.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.reference.optimizer_state import StateSpec
from quaver.torch.optim.checks import check_gradient
from quaver.torch.optim.quantized_gradient import QuantizedGradient, local_quantized, norm_of
from quaver.torch.optim.step import layout

# ---- held ------------------------------------------------------------------------------------------------

#: By a parameter's identity: what an optimizer changed about its gradients. One of a parameter that is gone removes
#: nothing.
_takers: dict[int, list[Any]] = {}
#: torch 2.13 has given it this name, and warns of the earlier one.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _forget(parameter: int, taker: Any) -> None:
    """Remove what an optimizer changed about a parameter's gradients, once it is gone."""
    taker.remove()
    own = _takers.get(parameter, [])
    if taker in own:
        own.remove(taker)
    if not own:
        _takers.pop(parameter, None)


class Gradients:
    """How the gradients of an optimizer's parameters are stored."""

    def __init__(self) -> None:
        #: Whether more micro-batches come, in which gradients add up as `p.grad`.
        self.accumulating = False
        #: Called with a parameter whose gradient is whole.
        self.arrived: Callable[[Tensor], None] | None = None
        self._watched: set[Tensor] = set()
        #: Parameters whose gradients are bfloat16, and themselves not.
        self._narrow: set[Tensor] = set()

    def prepare(self, p: Tensor, kind: str | StateSpec, whole: bool = False) -> None:
        """Have a parameter's gradients kept in a dtype, by its name, or in codes.

        The optimizer that was made last has them: one that was dropped may not be collected yet.

        Args:
            whole: whether the rule needs all of a matrix at once.
        """
        for taker in _takers.pop(id(p), []):
            taker.remove()
        if isinstance(kind, StateSpec):
            self._watch(p, kind, whole)
        elif kind == "bfloat16" and p.element_size() != 2 and layout.local(p) is p:
            self._narrow.add(p)
            self._watch(p, kind)

    def convert(self, p: Tensor) -> None:
        """Have a gradient that was assigned in high precision be bfloat16, if those of backwards are."""
        if p in self._narrow and type(p.grad) is Tensor:
            check_gradient(p)
            p.grad = QuantizedGradient.from_tensor(p.grad, None)

    def _own(self, p: Tensor, taker: Any) -> None:
        """Have what was changed about a parameter's gradients end with their optimizer."""
        _takers.setdefault(id(p), []).append(taker)
        weakref.finalize(self, _forget, id(p), taker)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Have `arrived` called for parameters whose gradients are floats too."""
        for p in parameters:
            if p not in self._watched:
                self._watch(p, None)

    def _watch(self, p: Tensor, kind: str | StateSpec | None, of_matrices: bool = False) -> None:
        if not p.requires_grad:
            return
        gradients = weakref.ref(self)

        def whole(parameter: Tensor) -> None:
            owner = gradients()
            if owner is None:
                return
            if kind is not None and parameter.grad is not None:
                owner._encode(parameter, None if isinstance(kind, str) else kind, of_matrices)
            if owner.accumulating:
                return
            if owner.arrived is not None:
                owner.arrived(parameter)

        self._watched.add(p)
        self._own(p, p.register_post_accumulate_grad_hook(whole))

    def finite(self, p: Tensor) -> Tensor:
        """Whether a parameter's gradient is: bool []."""
        held = local_quantized(p.grad)
        if held is not None:
            return held.all_finite()
        gradient = layout.part_of_gradient(p)
        return (gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all()

    @torch.no_grad()
    def _encode(self, p: Tensor, spec: StateSpec | None, of_matrices: bool) -> None:
        """Put codes in the place of `p.grad`, once it is whole, or bfloat16 numbers.

        Where a second backward has added to codes the sum stays in high precision, unless more micro-batches were
        announced: else each would be rounded away where the sum is sixteen times as large.
        """
        check_gradient(p)
        assert p.grad is not None
        own, adds_up = layout.local(p.grad), self.accumulating and spec is not None
        if isinstance(own, QuantizedGradient):
            if own.value is None or not (adds_up or own.contents.zeroed):
                return
            p.grad = layout.like(p, own.value, p.shape)
        if not adds_up:
            gradient = layout.gradient(p)
            flat = layout.flat(gradient.shape, layout.leading(p, of_matrices))
            p.grad = layout.like(p, QuantizedGradient.from_tensor(gradient, spec, flat), p.shape)

    def clip(self, parameters: Iterable[Tensor], largest: float, order: float) -> Tensor:
        """Multiply gradients so that their norm is at most `largest`; returns the norm before, float32 []."""
        parameters = list(parameters)
        norm = self.norm(parameters, float(order))
        self.hold_to(parameters, largest, norm)
        return norm

    @torch.no_grad()
    def hold_to(self, parameters: Iterable[Tensor], largest: float, norm: Tensor) -> None:
        """Multiply gradients by what brings `norm`, float32 [], to at most `largest`."""
        # Where one of them is NaN the others stay: then it can be told which.
        factor = (largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        for p in parameters:
            if p.grad is not None:
                layout.local(p.grad).mul_(factor.to(p.grad.device))

    def norm(self, parameters: Iterable[Tensor], order: float = 2.0) -> Tensor:
        """The norm of gradients, as the step will see them, of all ranks' parts: float32 [], the same on all ranks.

        Args:
            parameters: those without a gradient count nothing; ranks that divide them have the same in one order.
        """
        # By the process groups that divide a parameter: all ranks have the same, whatever gradients they have.
        norms: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:
            own = norms.setdefault(layout.groups(p), [])
            held = local_quantized(p.grad)
            if held is not None:
                own.append(held.norm_of(order))
            elif p.grad is not None:
                own.append(norm_of(layout.gradient(p), order))
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


def _nothing(p: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=p.device)


# ---- release ---------------------------------------------------------------------------------------------
# Parameters stepped while backward goes on: gradients collect until they take some bytes, then their parameters step.
#
# So the gradients of a model never exist together. Clipping by the norm of all of them needs all of them: in its place
# a step takes the norm of the step before, and Adam's bound guards the first. Source of releasing gradients: LOMO,
# arXiv:2306.09782.


class GradientRelease:
    """Gradients that have come in a backward and are not stepped yet."""

    def __init__(
        self, gradients: Gradients, update: Callable[[list[Tensor], Tensor | None], Any], most: int, max_norm: float
    ) -> None:
        """Begin.

        Args:
            update: a method that steps parameters, with a factor for their gradients. Neither its object nor
                `gradients` is kept alive: what an optimizer has changed about gradients ends with it.
            most: bytes that gradients may take before their parameters step.
            max_norm: what the norm of the last step's gradients is held to in this one.
        """
        self.gradients = weakref.proxy(gradients)
        self._update = weakref.WeakMethod(update)
        self.most = most
        self.max_norm = max_norm
        self._waiting: dict[Tensor, None] = {}
        self._bytes = 0
        self._squares: list[Tensor] = []
        #: Of all gradients of the last step, float32 []; None before the first.
        self.norm: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}

    def arrived(self, p: Tensor) -> None:
        """Take a parameter whose gradient is whole."""
        self._waiting[p] = None
        self._bytes += sum(tensor.nbytes for tensor in self._gradients_of([p]))
        if self._bytes >= self.most:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Step what waits, and free its gradients."""
        # Gradients that zero_grad has forgotten are not stepped.
        waiting = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._bytes = {}, 0
        if not waiting:
            return
        self._squares.append(self.gradients.norm(waiting).square())
        factor = None
        if self.norm is not None and self.max_norm != float("inf"):
            factor = (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0).float().reshape(())
        device = waiting[0].device
        if device.type == "cuda":
            self._beside(device, waiting, factor)
        else:
            self.update(waiting, factor)
            self._free(waiting)

    def update(self, waiting: list[Tensor], factor: Tensor | None) -> None:
        """Step parameters."""
        update = self._update()
        assert update is not None
        update(waiting, factor)

    def _beside(self, device: torch.device, waiting: list[Tensor], factor: Tensor | None) -> None:
        """On a stream of its own, so that backward goes on meanwhile."""
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.update(waiting, factor)
        # Freed below, or where this returns, and read by then maybe not.
        for tensor in (*self._gradients_of(waiting), *(() if factor is None else (factor,))):
            tensor.record_stream(side)
        self._free(waiting)

    def _gradients_of(self, parameters: list[Tensor]) -> Iterator[Tensor]:
        """All tensors that say the gradients of parameters."""
        for p in parameters:
            if p.grad is not None:
                own = layout.local(p.grad)
                yield from own.tensors() if isinstance(own, QuantizedGradient) else (own,)

    def _free(self, waiting: list[Tensor]) -> None:
        for p in waiting:
            p.grad = None

    def end(self) -> None:
        """Step what is left of this step, and wait for it."""
        self.flush()
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)
        if self._squares:
            self.norm = torch.stack([square.to(self._squares[0].device) for square in self._squares]).sum().sqrt()
            self._squares = []
