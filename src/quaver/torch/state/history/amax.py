"""Scaling history of a layer as plain buffers: a window of amaxes, and the encode factors computed from it.

`history` [length, 3] and `factor` [3] have one column each for input, weight and grad_output. Row 0 has the amaxes of
the present step. A factor of 0 is unset, and the tensor's own amax is used instead. A layer with members, such as
experts, has [members, length, 3] and [members, 3]. On a CPU in eager mode the numbers are read and written as Python
floats; on a GPU one launch rolls a whole model (`quaver.torch.state.history.roll_gpu`); elsewhere, and in compiled
code, all is tensor arithmetic without synchronization.
"""

import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quaver.recipes.spec import Recipe
from quaver.torch.backends.gpu import device
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import layer_state
from quaver.torch.state.layer_state import device_of, state_of

INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2

#: Every quantizable layer by number, and the numbers by layer.
_layers: dict[int, "weakref.ref[nn.Module]"] = {}
_numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_serials = itertools.count()
#: Nonempty once any layer has a history; until then steps skip the search.
_histories: dict[str, bool] = {}


class _BufferViews:
    """A layer's buffers as numpy views: access to a few floats through numpy takes a fifth of the time of torch."""

    __slots__ = ("address", "factor", "factors", "history", "newest")

    def __init__(self, history: Tensor, factor: Tensor) -> None:
        self.history, self.factor = history, factor
        #: Detects a change of memory.
        self.address = history.data_ptr()
        # Always numpy: torch views would be operations that a selective checkpoint sees in the first forward only.
        self.newest = history.numpy()[..., 0, :]  # [3] or [members, 3]
        self.factors = factor.numpy()


def create_history(layer: nn.Module, recipe: Recipe) -> None:
    """Create the buffers that a delayed recipe needs, unless they exist."""
    assert recipe.delayed is not None
    state, length = state_of(layer), recipe.delayed.length
    history, factor = layer._buffers.get("history"), layer._buffers.get("factor")
    if history is None or factor is None or history.shape[-2] != length:
        if history is not None and not is_tracing():
            warnings.warn(
                f"a layer's history of {history.shape[-2]} steps is replaced by an empty one of {length} steps",
                stacklevel=4,
            )
        where, each = device_of(layer), (len(state.members),) if state.members else ()
        # Stored column-major, so that a window is contiguous.
        layer.register_buffer("history", torch.zeros((*each, 3, length), dtype=torch.float32, device=where).mT)
        layer.register_buffer("factor", torch.zeros((*each, 3), dtype=torch.float32, device=where))
    elif state.delayed is not None and state.delayed is not recipe:
        # The factors belong to other formats or another margin; the next roll computes new ones.
        factor.zero_()
    register(layer)
    state.delayed = recipe
    if is_tracing() or layer_state.recomputing():
        # These forwards join no step: compiled code does not run `join`, nor does a copy in a reentrant checkpoint.
        state.copied, state.recorded_unsynchronized = False, True


def register(layer: nn.Module) -> None:
    """Number a layer, so that autocast can roll its history and a compiled backward can find it."""
    if layer._buffers.get("history") is not None and not _histories:
        _histories["any"] = True
    state = state_of(layer)
    if state.number is not None:
        return
    number = _numbers.get(layer)
    if number is None:
        number = _numbers[layer] = next(_serials)
        _layers[number] = weakref.ref(layer, partial(_forget, number, _layers))
    with torch.inference_mode(False):
        state.number = torch.tensor(number, dtype=torch.int64, device="cpu")


def number_of(layer: nn.Module) -> int:
    """Return the number of a registered layer, unique in this process forever."""
    return _numbers[layer]


def layer_of(number: Tensor) -> nn.Module | None:
    """Return the layer of a number that a compiled graph passes, or None if it has been deleted."""
    ref = _layers.get(int(number))
    return None if ref is None else ref()


def _forget(number: int, known: dict[int, Any], _: object) -> None:
    known.pop(number, None)


def newest_row(history: Tensor) -> Tensor:
    """Return a view of the amaxes of the present step: [3] or [members, 3]."""
    return history.select(-2, 0)


def layers() -> list[nn.Module]:
    """Return all live layers with history and factors, in order of construction."""
    if not _histories:
        return []
    alive = [ref() for ref in list(_layers.values())]
    # Another thread may be between creating the two buffers.
    buffers = [(layer, layer._buffers) for layer in alive if layer is not None]
    return [layer for layer, own in buffers if own.get("history") is not None and own.get("factor") is not None]


def saved_factors(layer: nn.Module) -> Any:
    """Return the factors that a forward and its backward use, as a tensor or list that later rolls do not change.

    Zeros (unset) without a history and on meta. A recomputed forward gets the factors of the first run.
    """
    factor = layer._buffers.get("factor")
    if factor is None or factor.is_meta:
        members = len(state_of(layer).members)
        if not is_tracing():
            return [[0.0] * 3 for _ in range(members)] if members else [0.0] * 3
        return torch.zeros((members, 3) if members else 3, dtype=torch.float32, device=device_of(layer))
    if is_tracing():
        return factor.clone()
    factors: Any
    if not factor.is_cpu:
        factors = _on_device(layer, factor)
    else:
        factors = views(layer).factors.tolist()
    if layer_state.state.replay is not None or layer_state.state.writing:
        factors = layer_state.logged_or_replayed(layer, "factors", factors)
    return factors


def _on_device(layer: nn.Module, factor: Tensor) -> Tensor:
    stacked = state_of(layer).stacked
    copied: Tensor | None = None if stacked is None else stacked[0].snapshot(stacked[1], factor)
    if copied is None:
        return factor.clone()
    # Flags travel with the tensor of factors.
    copied.known_set = stacked[0].is_set(stacked[1], factor)  # type: ignore[attr-defined]
    return copied


def is_set(column: int, factors: Tensor | list[float]) -> bool:
    """Return True if a factor is known to be nonzero without synchronization, so that one pass over the tensor
    suffices.

    On a GPU that is known a step or two later, and again after loading or a change of recipe. Writes through `.data`
    are not noticed.

    Args:
        factors: result of `saved_factors`.
    """
    if isinstance(factors, list):
        return factors[column] != 0.0
    known: list[bool] | None = None if is_tracing() else getattr(factors, "known_set", None)
    return known is not None and known[column]


def newest(layer: nn.Module, column: int, x: Tensor) -> Tensor | None:
    """Return the view of history[0, column] to which the kernel that casts x may write its amax.

    None if `record` must do it: in compiled code, in recomputation, or off a GPU.
    """
    history = layer._buffers["history"]
    assert history is not None
    if is_tracing() or layer_state.replaying() or history.device != x.device:
        return None
    if history.dtype is not torch.float32 or not has_kernels(history):
        return None
    state = state_of(layer)
    cached = state.newest
    # Cached, because creating a view costs the host as much as a launch.
    if cached is None or cached[0] is not history or cached[1] != history.data_ptr():
        row = history.detach()[0]
        cached = state.newest = history, history.data_ptr(), [row[i : i + 1] for i in range(3)]
    entry: Tensor = cached[2][column]
    return entry


def newest_each(layer: nn.Module, column: int, x: Tensor, first: int, count: int) -> Tensor | None:
    """Return the view of history[first : first + count, 0, column] of members, or None as in `newest`."""
    history = layer._buffers["history"]
    assert history is not None
    if is_tracing() or layer_state.replaying() or history.device != x.device:
        return None
    if history.dtype is not torch.float32 or not has_kernels(history):
        return None
    return history.detach()[first : first + count, 0, column]


def record(layer: nn.Module, column: int, amax: Tensor | float | None) -> None:
    """Raise row 0 to an amax; infinities and NaN are ignored, so that one overflow does not freeze the scale."""
    if layer_state.replaying():
        return
    if isinstance(amax, float):
        newest = views(layer).newest
        if amax < math.inf and newest[column] < amax:
            newest[column] = amax
        return
    history = layer._buffers["history"]
    assert history is not None and amax is not None
    if not is_tracing() and has_kernels(history) and history.device == amax.device:
        from quaver.torch.state.history import roll_gpu as kernels

        kernels.record_amax(history, column, amax)
        return
    value = torch.where(amax < math.inf, amax, 0.0).reshape(())
    history[0, column] = torch.maximum(history[0, column], value)


def record_each(layer: nn.Module, column: int, amaxes: Tensor | Sequence[float], first: int = 0) -> None:
    """Call `record` for consecutive members; pass 0 for members without tokens.

    Args:
        amaxes: float32 [members], or numbers.
        first: first member.
    """
    if layer_state.replaying():
        return
    history = layer._buffers["history"]
    assert history is not None
    if not isinstance(amaxes, Tensor):
        newest = views(layer).newest
        for member, amax in enumerate(amaxes, first):
            if amax < math.inf and newest[member, column] < amax:
                newest[member, column] = amax
        return
    last = first + amaxes.shape[0]
    value = torch.where(amaxes < math.inf, amaxes, 0.0).to(history.device)
    history[first:last, 0, column] = torch.maximum(history[first:last, 0, column], value)


def record_gradient(number: Tensor, amax: Tensor, first: int = 0) -> None:
    """Record a gradient's amax from a compiled backward, opaque to the compiler.

    A compiled backward may not write to a buffer that its forward has written, so it passes the layer's number.

    Args:
        first: first member, if the layer has members.
    """
    layer = layer_of(number)
    if layer is not None and layer._buffers.get("history") is not None:
        # Compiled layers belong to no step: see `quaver.torch.state.history.scaling_step`.
        state = state_of(layer)
        state.step, state.recorded_unsynchronized = None, True
        if state.family is not None:
            # Frozen layers compiled with it have no backward that could set this.
            state.family.recorded_unsynchronized = True
        if state.members:
            record_each(layer, GRAD_OUTPUT, amax, first)
        else:
            record(layer, GRAD_OUTPUT, amax)


def views(layer: nn.Module) -> _BufferViews:
    """Return the numpy views of the layer's buffers, recreated if the buffers have changed."""
    buffers = layer._buffers
    history, factor = buffers["history"], buffers["factor"]
    assert history is not None and factor is not None
    state = state_of(layer)
    cached: _BufferViews | None = state.views
    if (
        cached is None
        or cached.history is not history
        or cached.factor is not factor
        or cached.address != history.data_ptr()
    ):
        cached = state.views = _BufferViews(history, factor)
    return cached


def has_kernels(history: Tensor) -> bool:
    """Return True if kernels roll and record in a history: on a GPU, or under `only("triton")` on a CPU."""
    if history.is_cpu and "triton" not in device.forced_implementations:
        return False
    return not history.is_meta and not device.why_no_kernels(history.device)
