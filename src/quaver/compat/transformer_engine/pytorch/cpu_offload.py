"""Transformer Engine's `get_cpu_offload_context` and `mark_not_offload`, implemented by `quaver.torch.offload`."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quaver.torch.backends.gpu.host_memory import Transfers
from quaver.torch.offload import LayerRun, Offloader, stay_on_device
from quaver.torch.state.layer_state import recomputing

__all__ = ["get_cpu_offload_context", "mark_not_offload"]


class _LayerContext:
    """Context around the forward of each layer in turn.

    Args:
        count: number of layers that are moved, the first ones of each forward.
        layers: number of layers in a forward.
    """

    def __init__(self, offloader: Offloader, count: int, layers: int) -> None:
        self.offloader, self.count, self.layers = offloader, count, layers
        #: Index of the layer that runs next.
        self.index = 0
        self.hooks: Any = None

    def __enter__(self) -> "_LayerContext":
        if self.hooks is not None:
            raise RuntimeError("the context is already entered; leave it after each layer")
        # A recomputation saves as its forward did, in the hooks of the checkpoint.
        if self.index < self.count and not recomputing():
            self.offloader.begin(LayerRun(f"number {self.index}", self))
            self.hooks = self.offloader.hooks()
            self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if recomputing():
            return
        hooks, self.hooks = self.hooks, None
        # After an error the next forward begins at the first layer.
        self.index = 0 if error[0] is not None else (self.index + 1) % self.layers
        if hooks is not None:
            hooks.__exit__(*error)
            self.offloader.end(self)

    def synchronize(self, x: Tensor) -> Tensor:
        """Return x, the result of a layer. The gradient of the last layer's result starts the copies back."""
        if self.index == 0:
            self.offloader.finish(x)
        return x


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
    *,
    _transfers: Any = None,
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return a context to enter around the forward of each layer, and a function to call on the result of each.

    The first `num_layers` of every `model_layers` layers are moved. Copies are always double-buffered, and pinned
    buffers are always reused, so `double_buffering` and `retain_pinned_cpu_buffers` have no effect.

    Args:
        enabled: False returns a context and a function that do nothing.
        num_layers, model_layers: number of layers to move, and number of layers in a forward.
        offload_weights: deprecated in Transformer Engine; here weights are never moved, and True only warns.
        offload_stream: CUDA stream for the copies; None for a new one.

    Raises:
        ValueError: `offload_activations` and `offload_weights` are both False, `num_layers` is not between 0 and
            `model_layers`, or `manual_synchronization` is True.
    """
    if not (offload_activations or offload_weights):
        raise ValueError("offload_activations and offload_weights are both False; pass offload_activations=True")
    if manual_synchronization:
        raise ValueError(
            "manual_synchronization is not supported: copies start and end with layers; pass num_layers instead"
        )
    if offload_weights:
        warnings.warn("offload_weights has no effect: weights stay on the device", DeprecationWarning, stacklevel=2)
    if not enabled or not offload_activations:
        return contextlib.nullcontext(), lambda x: x
    if num_layers is None or not 0 <= num_layers <= model_layers:
        raise ValueError(f"num_layers is {num_layers}; pass a number from 0 to model_layers, which is {model_layers}")
    context = _LayerContext(Offloader(_transfers or Transfers(offload_stream)), num_layers, model_layers)
    return context, context.synchronize


def mark_not_offload(*tensors: Tensor | None) -> None:
    """Leave these tensors on the device when a layer saves them."""
    stay_on_device(*tensors)
