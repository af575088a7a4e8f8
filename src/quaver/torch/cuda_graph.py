"""Training steps captured as a CUDA graph and replayed, so that host time is independent of the number of kernels.

The first calls are real steps that rehearse the capture: they run eagerly but choose the same code. The next call is
captured, and all later ones replay it. Each replay quantizes the weights again, rolls histories and advances noise
counters; the caches on the host are notified of the step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu import capture
from quaver.torch.state import observer, weight_cache

#: Calls before the capture: the second has gradients and histories left by the first, and the third has the factors
#: computed from them, with which tensors are quantized in one pass.
WARM_UP = 3


class CapturedStep:
    """A function of GPU tensors whose launches are captured once and replayed.

    Results equal those of the same calls without capture; they are overwritten by the next call.

    Args:
        step: takes tensors of the same shapes and dtypes at every call, and returns tensors or nothing. It must not
            read the device on the host (`.item()`, `.cpu()`, an `if` on a tensor). Values that change from call to
            call, such as the learning rate, must be tensors; gradients are set to None at its beginning.
        warm_up: number of calls before the captured one.

    Raises:
        ValueError: there is no GPU, the inputs are on another GPU than the current one at construction, or a later call
            passes other shapes or dtypes.
        RuntimeError: the step does something that cannot be captured, or `inspect` or `count` is active in a call.
    """

    def __init__(self, step: Callable[..., Any], *, warm_up: int = WARM_UP) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "there is no CUDA device, which capturing a step needs; run the step uncaptured (in the trainer, "
                "leave out --capture)"
            )
        if warm_up < 1:
            raise ValueError(f"warm_up is {warm_up}; at least 1 call must run before the capture")
        self.step = step
        self.warm_up = warm_up
        self.calls = 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        if observer.active.observers:
            raise RuntimeError(
                "a CapturedStep cannot be inspected or counted, because a replayed graph calls no layer: call the step "
                "itself in these steps"
            )
        self._take(inputs)
        self.calls += 1
        if self.calls <= self.warm_up:
            return self._on_side_stream()
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        # The weights have changed, but their versions have not, and no optimizer hook ran.
        weight_cache.count_step()
        return self._result

    def _take(self, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs to the tensors that the captured step reads."""
        if not self._inputs:
            recorded = self._stream.device
            other = next((x.device for x in inputs if x.is_cuda and x.device != recorded), None)
            if other is not None:
                raise ValueError(
                    f"this CapturedStep captures on {recorded}, and got a tensor on {other}: create and call it inside "
                    f"torch.cuda.device({other.index})"
                )
            self._inputs = tuple(x.clone() for x in inputs)
            return
        known, actual = ([(tuple(x.shape), x.dtype) for x in each] for each in (self._inputs, inputs))
        if known != actual:
            raise ValueError(
                f"the captured step takes {described(known)} and got {described(actual)}; create another CapturedStep "
                "for other shapes"
            )
        for static_input, x in zip(self._inputs, inputs, strict=True):
            static_input.copy_(x)

    def _on_side_stream(self) -> Any:
        """Rehearse the step on the stream of the capture, so that all that belongs to the stream exists."""
        current = torch.cuda.current_stream()
        # After this the host knows which factors the previous step has set, so that tensors need one pass instead of
        # two.
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), capture.rehearsing(self._stream.device):
            result = self.step(*self._inputs)
        current.wait_stream(self._stream)
        return result

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._result = self.step(*self._inputs)
        except Exception as error:
            # A failed capture leaves its stream as the current one.
            torch.cuda.set_stream(current)
            first_line = str(error).partition("\n")[0]
            raise RuntimeError(
                f"the step cannot be captured as a CUDA graph ({first_line}); it may read the "
                "device on the host (.item(), .cpu(), an if on a tensor), or run a layer that no call before it ran; "
                "run it without CapturedStep"
            ) from error
        return graph


def described(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors) or "nothing"
