"""Parameters stepped while backward goes on: gradients collect until they take some bytes, then their parameters step.

So the gradients of a model never exist together. Clipping by the norm of all of them needs all of them: in its place a
step takes the norm of the step before, and Adam's bound guards the first. Source of releasing gradients: LOMO,
arXiv:2306.09782.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from quaver.torch.optim.gradients.held import Gradients
from quaver.torch.optim.quantized_gradient import QuantizedGradient
from quaver.torch.optim.stepping import layout


class Release:
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
