"""The buffers that recipes keep state in: making them, and making a checkpoint of any recipe fit."""

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

#: Buffers that recipes add.
STATE = ("history", "factor", "count")


class _SavingState(threading.local):
    """What a thread's state dicts are."""

    #: None for all of a layer; else those of unconverted layers, with weights that were decoded so far by layer.
    decoded: dict[nn.Module, Tensor] | None = None


saving = _SavingState()


def prepare(layer: nn.Module, recipe: Recipe) -> None:
    """Give a layer the buffers that a recipe keeps state in: for training, nothing else writes them."""
    if layer_state.replaying():
        # The first run has prepared it; since then another recipe may have.
        return
    if recipe.delayed is None and not recipe.stochastic and is_tracing():
        # It has none to give, and a compiled step that noted so would be compiled again for the second.
        return
    if not is_tracing() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return prepare(layer, recipe)
    if recipe.delayed is not None:
        amax.prepare(layer, recipe)
    if recipe.stochastic:
        streams(layer)
        if layer._buffers.get("count") is None:
            layer.register_buffer("count", fresh_count(layer))
    state_of(layer).prepared = recipe


def outlast(layer: nn.Module) -> None:
    """Make ordinary tensors of buffers that a copy, a load or a move in inference mode has made: torch forbids writes
    to those elsewhere, and any step may roll a history."""
    for name in STATE:
        buffer = layer._buffers.get(name)
        if buffer is not None and buffer.is_inference():
            with torch.inference_mode(False):
                layer._buffers[name] = buffer.clone()


def match_state(layer: nn.Module, state_dict: Any, prefix: str, load: object) -> None:
    """Make a checkpoint of any recipe fit: adopt state that the layer may need yet, drop what its recipe does not.

    What lacks state altogether is of the unconverted model, or of a recipe without any: this layer's starts fresh.
    """
    stateless = not any(prefix + name in state_dict for name in STATE)
    for name in STATE:
        key = prefix + name
        held, given = layer._buffers.get(name), state_dict.get(key)
        if name == "history" and given is not None:
            state_of(layer).recorded_apart = True
        if given is None:
            if held is not None and name != "factor":
                if not stateless:
                    _warn_once(load, f"{key} is not in the checkpoint (another recipe wrote it): it starts fresh")
                _start_fresh(layer, name, state_dict, prefix)
        elif held is None and layer.recipe is not None:
            del state_dict[key]
        elif held is None:
            layer.register_buffer(name, given.detach().clone().to(device_of(layer)))
            amax.register(layer)
        elif held.shape != given.shape:
            _warn_once(
                load,
                f"{key} has shape {tuple(given.shape)} in the checkpoint and {tuple(held.shape)} here (another history "
                "length): it starts fresh",
            )
            _start_fresh(layer, name, state_dict, prefix)
        else:
            state_dict[key] = given.to(held.dtype)
    if prefix + "count" in state_dict:
        _match_stream(layer, state_dict, prefix + "count")


def take_state(layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Make a buffer for what a checkpoint holds of a layer that has not run and takes its recipe from an autocast.

    Returns:
        Whether there was one to make.
    """
    if layer._buffers.get(name) is not None or layer.recipe is not None:
        return False
    # A history lies column by column.
    transposed = name == "history"
    lies = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    buffer = torch.zeros(lies, dtype=dtype, device=device_of(layer))
    layer.register_buffer(name, buffer.mT if transposed else buffer)
    amax.register(layer)
    return True


def _match_stream(layer: nn.Module, state_dict: Any, key: str) -> None:
    """Go on drawing from the stream that the checkpoint's layer drew from, unless it or this one goes by its name."""
    fresh = fresh_count(layer, state_dict[key].device)
    if layer.__dict__.get("qualified_name") is not None or stream_of(state_dict[key]) < 0:
        fresh[..., :2] = state_dict[key][..., :2]
        state_dict[key] = fresh
    else:
        state, first = state_of(layer), stream_of(state_dict[key])
        # A rank of a mesh has the last of the matrices, and its serial is that of matrix 0.
        state.serial = first - int(state.members[0]) if state.members else first
        streams(layer)


def _start_fresh(layer: nn.Module, name: str, state_dict: Any, prefix: str) -> None:
    first = next((name for name, p in layer._parameters.items() if p is not None), "weight")
    given, device = state_dict.get(prefix + first), device_of(layer)
    if device.type == "meta" and given is not None:
        # A layer on meta takes on what the checkpoint holds, where that lies.
        device = given.device
    if name == "count":
        state_dict[prefix + name] = fresh_count(layer, device)
        return
    for buffer in ("history", "factor"):
        state_dict[prefix + buffer] = torch.zeros_like(layer._buffers[buffer], device=device)  # type: ignore[arg-type]


class _LoadState:
    """The load_state_dict that warned last, known by the list it collects missing keys in."""

    current: object = None


def _warn_once(load: object, sentence: str) -> None:
    """Warn for the first layer of a load; the others say the same."""
    if _LoadState.current is not load:
        _LoadState.current = load
        warnings.warn(sentence + ", and so does what other layers lack", stacklevel=2)
