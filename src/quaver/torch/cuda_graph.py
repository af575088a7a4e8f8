"""A training step recorded once as a CUDA graph and replayed: the host's time no longer depends on how many kernels.

The first calls are real steps that rehearse the recording: they run eagerly and decide as it will. The next one is
recorded and every one from then on replayed. Weights are quantized anew in each replay, histories roll in it, and noise
draws on; what layers keep on the host is told that the step has run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.gpu import capture
from quaver.torch.state import weight_cache

#: Calls that run before one is recorded: the second sees the gradients and histories that the first has left, and
#: the third the factors that follow from them, which one pass over a tensor needs.
WARM_UP = 3


class CapturedStep:
    """A function of tensors on a GPU whose launches are recorded once and replayed.

    Args:
        step: takes tensors of the same shapes and dtypes at every call, and returns tensors or nothing. It reads
            nothing of the device on the host (`.item()`, `.cpu()`, an `if` on a tensor); what varies from call to call
            is in a tensor, such as the learning rate; gradients are set to None at its beginning.
        warm_up: calls that run before the one that is recorded.
    Raises:
        ValueError: there is no GPU, the inputs are on another than the one that was current when this was made, or a
            later call brings other shapes or dtypes.
        RuntimeError: the step does what cannot be recorded.
    Results are overwritten by the next call. Exact: what the same calls give without it.
    """

    def __init__(self, step: Callable[..., Any], *, warm_up: int = WARM_UP) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "there is no CUDA device, and only on one can a step be captured; run it uncaptured "
                "(in the trainer, leave out --capture)"
            )
        if warm_up < 1:
            raise ValueError(f"warm_up is {warm_up}; it takes at least 1 call before everything is in place")
        self.step = step
        self.warm_up = warm_up
        self.calls = 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._result: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        self._take(inputs)
        self.calls += 1
        if self.calls <= self.warm_up:
            return self._beside()
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()
        # The weights have changed, and neither their versions nor an optimizer's hook say so.
        weight_cache.stepped()
        return self._result

    def _take(self, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs to where the recording reads them."""
        if not self._inputs:
            recorded = self._stream.device
            other = next((x.device for x in inputs if x.is_cuda and x.device != recorded), None)
            if other is not None:
                raise ValueError(
                    f"this CapturedStep records what runs on {recorded}, and is given a tensor on {other}: make it and "
                    f"call it inside torch.cuda.device({other.index})"
                )
            self._inputs = tuple(x.clone() for x in inputs)
            return
        known, given = ([(tuple(x.shape), x.dtype) for x in each] for each in (self._inputs, inputs))
        if known != given:
            raise ValueError(
                f"the captured step takes {described(known)} and is given {described(given)}; "
                "make another CapturedStep for other shapes"
            )
        for kept, x in zip(self._inputs, inputs, strict=True):
            kept.copy_(x)

    def _beside(self) -> Any:
        """Rehearse the step on the stream that will be recorded: what belongs to a stream is in place by then."""
        current = torch.cuda.current_stream()
        # The host knows by then which factors the step before has set: they need one pass over a tensor instead of two.
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
            # A capture that cannot be ended leaves its stream in place.
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
