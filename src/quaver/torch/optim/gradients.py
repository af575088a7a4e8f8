"""Gradients between backward and step in fewer bits than float32, and stepping during backward.

A hook replaces `p.grad` by a `QuantizedGradient` once it is complete.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.reference.optimizer_state import StateSpec
from quaver.torch.linear.stored_weight import gradient_dtype
from quaver.torch.optim import layout
from quaver.torch.optim.quantized_gradient import QuantizedGradient, norm_of
from quaver.torch.quantized_tensor import memory_of

# ---- storage of gradients ----

#: Hooks that an optimizer registered on a parameter's gradients, by the parameter's id. A stale entry has no effect.
_takers: dict[int, list[Any]] = {}
#: torch 2.13 renamed this function and warns about the earlier name.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
#: Registers a function that the running backward calls at its end. Private to torch; None if a release lacks it.
_at_end_of_backward: Callable[[Callable[[], None]], None] | None = getattr(_engine, "queue_callback", None)


def _forget(parameter: int, taker: Any) -> None:
    """Remove an optimizer's hook from a parameter once the optimizer is gone."""
    taker.remove()
    own = _takers.get(parameter, [])
    if taker in own:
        own.remove(taker)
    if not own:
        _takers.pop(parameter, None)


class Gradients:
    """Storage of the gradients of an optimizer's parameters."""

    def __init__(self) -> None:
        #: True while further micro-batches follow, so that gradients accumulate in `p.grad`.
        self.accumulating = False
        #: Called with each parameter whose gradient is complete, or None.
        self.arrived: Callable[[Tensor], None] | None = None
        self._watched: set[Tensor] = set()
        #: Parameters that are not bfloat16 but have bfloat16 gradients.
        self._narrow: set[Tensor] = set()

    def prepare(self, p: Tensor, kind: str | StateSpec, needs_matrix: bool = False) -> None:
        """Register the hook that stores a parameter's gradients in a dtype or as codes.

        The most recent optimizer of a parameter wins: an earlier, dropped one may not have been collected yet.

        Args:
            p: the parameter.
            kind: name of a dtype, or the format of codes.
            needs_matrix: the rule needs a whole matrix at once.
        """
        for taker in _takers.pop(id(p), []):
            taker.remove()
        if isinstance(kind, StateSpec):
            self._watch(p, kind, needs_matrix)
        elif kind == "bfloat16" and gradient_dtype(p).itemsize != 2 and layout.local(p) is memory_of(p):
            self._narrow.add(p)
            self._watch(p, kind)

    def convert(self, p: Tensor) -> None:
        """Convert a gradient that the user assigned in high precision to bfloat16, if backward would have
        stored it so.
        """
        if p in self._narrow and type(p.grad) is Tensor:
            check_gradient(p)
            p.grad = QuantizedGradient.from_tensor(p.grad, None)

    def _own(self, p: Tensor, taker: Any) -> None:
        """Tie a hook on a parameter's gradients to the lifetime of this object."""
        _takers.setdefault(id(p), []).append(taker)
        weakref.finalize(self, _forget, id(p), taker)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Call `arrived` also for parameters with unquantized gradients."""
        for p in parameters:
            if p not in self._watched:
                self._watch(p, None)

    def _watch(self, p: Tensor, kind: str | StateSpec | None, needs_matrix: bool = False) -> None:
        if not p.requires_grad:
            return
        gradients = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            owner = gradients()
            if owner is None:
                return
            if kind is not None and parameter.grad is not None:
                owner._encode(parameter, None if isinstance(kind, str) else kind, needs_matrix)
            if owner.accumulating:
                return
            if owner.arrived is not None:
                owner.arrived(parameter)

        self._watched.add(p)
        self._own(p, p.register_post_accumulate_grad_hook(on_gradient))

    def finite(self, p: Tensor) -> Tensor:
        """Return True if a parameter's gradient is finite: bool []."""
        quantized = layout.local_quantized(p.grad)
        if quantized is not None:
            return quantized.all_finite()
        gradient = layout.part_of_gradient(p)
        return (gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all()

    @torch.no_grad()
    def _encode(self, p: Tensor, spec: StateSpec | None, needs_matrix: bool) -> None:
        """Replace a complete `p.grad` by codes or bfloat16.

        If a second backward has added to a quantized gradient, the sum stays in high precision. Within `accumulating()`
        gradients stay unquantized, because each addend would be rounded away where the sum is sixteen times as large.
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
            flat = layout.flat(gradient.shape, layout.num_leading_dims(p, needs_matrix))
            p.grad = layout.like(p, QuantizedGradient.from_tensor(gradient, spec, flat), p.shape)

    def clip(self, parameters: Iterable[Tensor], largest: float, order: float) -> Tensor:
        """Scale gradients so that their norm is at most `largest`; returns the norm before, float32 []."""
        parameters = list(parameters)
        norm = self.norm(parameters, float(order))
        self.hold_to(parameters, largest, norm)
        return norm

    @torch.no_grad()
    def hold_to(self, parameters: Iterable[Tensor], largest: float, norm: Tensor) -> None:
        """Scale gradients by the factor that brings `norm`, float32 [], to at most `largest`."""
        # If the norm is NaN, leave gradients unscaled, so that one can find out which of them is NaN.
        factor = (largest / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        for p in parameters:
            if p.grad is not None:
                layout.local(p.grad).mul_(factor.to(p.grad.device))

    def norm(self, parameters: Iterable[Tensor], order: float = 2.0) -> Tensor:
        """Return the norm of the gradients as the step will use them, over all ranks: float32 [], the same on all
        ranks.

        Args:
            parameters: those without a gradient count as 0. Ranks that share parameters must pass the same ones in the
                same order.
            order: order of the norm.
        """
        # Group by the process groups that shard a parameter, which are the same on all ranks even if gradients differ.
        norms: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in parameters:
            own = norms.setdefault(layout.groups(p), [])
            quantized = layout.local_quantized(p.grad)
            if quantized is not None:
                own.append(quantized.norm_of(order))
            elif p.grad is not None:
                own.append(norm_of(layout.gradient(p), order))
            elif not own:
                own.append(torch.zeros((), dtype=torch.float32, device=p.device))
        sums = []
        for groups, own in norms.items():
            total = torch.linalg.vector_norm(torch.stack([norm.to(own[0].device) for norm in own]), order)
            for group in groups:
                every = total.new_empty(dist.get_world_size(group))
                all_gather(every, total.reshape(1), group)
                # Every rank reduces the gathered values itself, because an all-reduce may give ranks different bits.
                total = torch.linalg.vector_norm(every, order)
            sums.append(total)
        if not sums:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        return torch.linalg.vector_norm(torch.stack([each.to(sums[0].device) for each in sums]), order)


def check_gradient(p: Tensor) -> None:
    """Raise a ValueError for a sparse gradient."""
    assert p.grad is not None
    if p.grad.is_sparse:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is sparse; use nn.Embedding with "
            "sparse=False, or torch.optim.SparseAdam for its weight"
        )


# ---- stepping during backward ----
# Gradients accumulate until they take a number of bytes; then their parameters are stepped and the gradients freed.
#
# The gradients of a model never exist all at once. Clipping by their total norm would need all of them, so a step uses
# the norm of the previous step; Adam's bound limits the first step. Source of releasing gradients: LOMO,
# arXiv:2306.09782.


class GradientRelease:
    """Gradients of the current backward that are not stepped yet."""

    def __init__(
        self,
        gradients: Gradients,
        update: Callable[[list[Tensor], Tensor | None], Any],
        most: int,
        max_norm: float,
        in_thread: bool = False,
    ) -> None:
        """Set up stepping during backward.

        Args:
            gradients: storage of the gradients. Only a weak reference is stored, like that of `update`'s object, so
                that an optimizer's hooks end with it.
            update: method that steps parameters, given a factor for their gradients.
            most: bytes of gradients that trigger a step.
            max_norm: scale gradients by the factor that would have clipped the previous step's norm to this.
            in_thread: step in a thread, because the CPU computes the steps while backward continues. It runs only
                during backward, so that code after it finds no weight or gradient in the middle of a step.
        """
        self.gradients = weakref.proxy(gradients)
        self._update = weakref.WeakMethod(update)
        self.most = most
        self.max_norm = max_norm
        self._waiting: dict[Tensor, None] = {}
        self._bytes = 0
        self._squares: list[Tensor] = []
        #: Norm of all gradients of the previous step, float32 []; None before the first.
        self.norm: Tensor | None = None
        self._streams: dict[torch.device, Any] = {}
        self._thread = ThreadPoolExecutor(1, "quaver-step") if in_thread and _at_end_of_backward else None
        self._stepping: Future[None] | None = None

    def arrived(self, p: Tensor) -> None:
        """Add a parameter whose gradient backward has completed, and step if enough bytes are waiting."""
        self._waiting[p] = None
        self._bytes += sum(tensor.nbytes for tensor in self._gradients_of([p]))
        if self._bytes >= self.most:
            self.flush()
            if self._stepping is not None and _at_end_of_backward is not None:
                _at_end_of_backward(self.join)

    @torch.no_grad()
    def flush(self) -> None:
        """Step all waiting parameters, and free their gradients; in a thread, after those of the flush before."""
        # The flush before clears its gradients.
        self.join()
        # zero_grad may have cleared others.
        waiting = [p for p in self._waiting if p.grad is not None]
        self._waiting, self._bytes = {}, 0
        if not waiting:
            return
        square, factor = self.gradients.norm(waiting).square(), None
        if self.norm is not None and self.max_norm != float("inf"):
            factor = (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0).float().reshape(())
        if self._thread is None:
            self._step(waiting, square, factor)
            return
        device = waiting[0].device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._stepping = self._thread.submit(self._step, waiting, square, factor, ready)

    @torch.no_grad()
    def _step(self, waiting: list[Tensor], square: Tensor, factor: Tensor | None, ready: Any = None) -> None:
        """Step parameters and free their gradients.

        Args:
            waiting: the parameters.
            square: square of their gradients' norm, float32 []; added only now, because a failed step is repeated.
            factor: multiplier of their gradients, float32 [], or None.
            ready: event after which the gradients are complete; None for the current stream.
        """
        device = waiting[0].device
        if device.type == "cuda":
            self._beside(device, waiting, factor, ready)
        else:
            self.update(waiting, factor)
        self._squares.append(square)
        for p in waiting:
            p.grad = None

    def join(self) -> None:
        """Wait for the step in the thread, and raise its error."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.result()

    def update(self, waiting: list[Tensor], factor: Tensor | None) -> None:
        """Step parameters by the optimizer's method."""
        update = self._update()
        assert update is not None
        update(waiting, factor)

    def _beside(self, device: torch.device, waiting: list[Tensor], factor: Tensor | None, ready: Any) -> None:
        """Step on a separate CUDA stream, while backward continues; see `_step`."""
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)
        side.wait_event(torch.cuda.current_stream(device).record_event() if ready is None else ready)
        with torch.cuda.stream(side):
            self.update(waiting, factor)
        # The tensors are freed before the side stream has read them, so tell the allocator.
        for tensor in (*self._gradients_of(waiting), *(() if factor is None else (factor,))):
            tensor.record_stream(side)

    def _gradients_of(self, parameters: list[Tensor]) -> Iterator[Tensor]:
        """Yield all tensors that store the gradients of parameters."""
        for p in parameters:
            if p.grad is not None:
                own = layout.local(p.grad)
                yield from own.tensors() if isinstance(own, QuantizedGradient) else (own,)

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Step the remaining parameters, and wait for all steps.

        Args:
            parameters: those with a gradient, also if no hook reported it.
        """
        self._waiting.update(dict.fromkeys(parameters))
        self.flush()
        self.join()
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)
        if self._squares:
            self.norm = torch.stack([square.to(self._squares[0].device) for square in self._squares]).sum().sqrt()
            self._squares = []
