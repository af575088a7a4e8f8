"""State buffers of recipes: create them, and adapt checkpoints written under any recipe."""

import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import layer_state
from quaver.torch.state.history import amax
from quaver.torch.state.layer_state import device_of, state_of
from quaver.torch.state.noise import fresh_count, stream_of, streams

#: Names of the buffers that recipes add.
STATE = ("history", "factor", "count")


class _SavingState(threading.local):
    """Kind of state dict that a thread is saving."""

    #: None for the full state of a layer; otherwise saves the layout of unconverted layers, with the weights
    #: dequantized so far by layer.
    decoded: dict[nn.Module, Tensor] | None = None


saving = _SavingState()


def create_state_buffers(layer: nn.Module, recipe: Recipe) -> None:
    """Create the buffers that a recipe stores state in; only training needs them."""
    if layer_state.replaying():
        # The first run has prepared the layer, and another recipe may have done so since.
        return
    if recipe.delayed is None and not recipe.stochastic and is_tracing():
        # Nothing to create; recording that would recompile a compiled step at its second call.
        return
    if not is_tracing() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return create_state_buffers(layer, recipe)
    if recipe.delayed is not None:
        amax.create_history(layer, recipe)
    if recipe.stochastic:
        streams(layer)
        if layer._buffers.get("count") is None:
            layer.register_buffer("count", fresh_count(layer))
    state_of(layer).buffers_recipe = recipe


def outlast(layer: nn.Module) -> None:
    """Replace inference tensors among the state buffers by ordinary ones.

    Copies, loads and moves in inference mode create them, and torch forbids writes to them elsewhere, but any step may
    update a history.
    """
    for name in STATE:
        buffer = layer._buffers.get(name)
        if buffer is not None and buffer.is_inference():
            with torch.inference_mode(False):
                layer._buffers[name] = buffer.clone()


def match_state(layer: nn.Module, state_dict: Any, prefix: str, load: object) -> None:
    """Adapt a checkpoint written under any recipe: adopt state that the layer may still need, drop what its recipe does
    not.

    A checkpoint without any state (unconverted model, or a stateless recipe) resets the layer's state.
    """
    stateless = not any(prefix + name in state_dict for name in STATE)
    for name in STATE:
        key = prefix + name
        own, loaded = layer._buffers.get(name), state_dict.get(key)
        if name == "history" and loaded is not None:
            state_of(layer).recorded_unsynchronized = True
        if loaded is None:
            if own is not None and name != "factor":
                if not stateless:
                    _warn_once(load, f"{key} is not in the checkpoint (another recipe wrote it): it starts fresh")
                _start_fresh(layer, name, state_dict, prefix)
        elif own is None and layer.recipe is not None:
            del state_dict[key]
        elif own is None:
            layer.register_buffer(name, loaded.detach().clone().to(device_of(layer)))
            amax.register(layer)
        elif own.shape != loaded.shape:
            _warn_once(
                load,
                f"{key} has shape {tuple(loaded.shape)} in the checkpoint and {tuple(own.shape)} here (another history "
                "length): it starts fresh",
            )
            _start_fresh(layer, name, state_dict, prefix)
        else:
            state_dict[key] = loaded.to(own.dtype)
    if prefix + "count" in state_dict:
        _match_stream(layer, state_dict, prefix + "count")


def take_state(layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Create a buffer for state in a checkpoint, for a layer without its own recipe that has not run yet.

    Returns:
        True if a buffer was created.
    """
    if layer._buffers.get(name) is not None or layer.recipe is not None:
        return False
    # A history is stored column-major.
    transposed = name == "history"
    stored_shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    buffer = torch.zeros(stored_shape, dtype=dtype, device=device_of(layer))
    layer.register_buffer(name, buffer.mT if transposed else buffer)
    amax.register(layer)
    return True


def _match_stream(layer: nn.Module, state_dict: Any, key: str) -> None:
    """Continue the checkpoint's noise stream, unless either layer derives its stream from its name."""
    fresh = fresh_count(layer, state_dict[key].device)
    if layer.__dict__.get("qualified_name") is not None or stream_of(state_dict[key]) < 0:
        fresh[..., :2] = state_dict[key][..., :2]
        state_dict[key] = fresh
    else:
        state, first = state_of(layer), stream_of(state_dict[key])
        # A rank of a mesh may have only later matrices of a stack; the serial is that of matrix 0.
        state.serial = first - int(state.members[0]) if state.members else first
        streams(layer)


def _start_fresh(layer: nn.Module, name: str, state_dict: Any, prefix: str) -> None:
    first = next((name for name, p in layer._parameters.items() if p is not None), "weight")
    loaded, device = state_dict.get(prefix + first), device_of(layer)
    if device.type == "meta" and loaded is not None:
        # A layer on meta gets the checkpoint's tensors, on their device.
        device = loaded.device
    if name == "count":
        state_dict[prefix + name] = fresh_count(layer, device)
        return
    for buffer in ("history", "factor"):
        state_dict[prefix + buffer] = torch.zeros_like(layer._buffers[buffer], device=device)  # type: ignore[arg-type]


class _LoadState:
    """The load_state_dict call that warned last, identified by its list of missing keys."""

    current: object = None


def _warn_once(load: object, sentence: str) -> None:
    """Warn for the first layer of a load only."""
    if _LoadState.current is not load:
        _LoadState.current = load
        warnings.warn(sentence + ", and so does what other layers lack", stacklevel=2)
