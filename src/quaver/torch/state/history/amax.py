"""Delayed scaling's state in a layer: a window of amaxes and the factors that follow from it, as plain buffers.

`history` [length, 3] and `factor` [3] have a column each for input, weight and grad_output. Row 0 is what the present
step has recorded so far; a factor of 0 is unset, and the tensor's own amax is used. A layer with members, such as
experts, has [members, length, 3] and [members, 3]: a window for each. On a CPU in eager mode the numbers
are read and written as Python floats; on a GPU one launch rolls a whole model (`quaver.torch.state.history.roll_gpu`);
elsewhere, and inside compiled code, everything is tensor arithmetic without a synchronization.
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

#: Every quantizable layer, by number, and the numbers of the layers.
_layers: dict[int, "weakref.ref[nn.Module]"] = {}
_numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_serials = itertools.count()
#: Filled once any layer has a history: until then no step looks for one.
_histories: dict[str, bool] = {}


class _BufferViews:
    """A layer's buffers as numpy arrays of the same memory, and the address by which a change of memory is seen.

    Reading and writing a few floats through numpy takes a fifth of the time it takes through torch.
    """

    __slots__ = (
        "address",
        "amax_values",
        "columns",
        "factor",
        "factors",
        "flat",
        "history",
        "newest",
        "recorded",
        "version",
    )

    def __init__(self, history: Tensor, factor: Tensor) -> None:
        self.history = history
        self.factor = factor
        self.address = history.data_ptr()
        # By numpy from the first step on: views of torch's would be operations that a selective checkpoint sees in the
        # forward that makes them, and misses in its recomputation.
        columns = history.numpy().swapaxes(-1, -2)
        self.columns = columns.reshape(-1, columns.shape[-1])  # [3 of each member, length], contiguous
        self.flat = self.columns.reshape(-1) if self.columns.flags.c_contiguous else None
        self.newest = self.columns[:, 0]
        #: As `columns`, one number each.
        self.factors = factor.numpy().reshape(-1)
        #: True if eager code noted something since the last roll; compiled code and loading raise the version.
        self.recorded = False
        self.version = -1
        #: The largest value of each column but for row 0: searching a window takes longer than all the rest of a roll.
        self.amax_values: list[float] | None = None


def prepare(layer: nn.Module, recipe: Recipe) -> None:
    """Give a layer the buffers that a delayed recipe needs, unless it has them."""
    assert recipe.delayed is not None
    state, length = state_of(layer), recipe.delayed.length
    history, factor = layer._buffers.get("history"), layer._buffers.get("factor")
    if history is None or factor is None or history.shape[-2] != length:
        if history is not None and not is_tracing():
            warnings.warn(
                f"a layer's history of {history.shape[-2]} steps makes room for one of {length}, which starts fresh",
                stacklevel=4,
            )
        where, each = device_of(layer), (len(state.members),) if state.members else ()
        # Stored column by column, so that a window is contiguous.
        layer.register_buffer("history", torch.zeros((*each, 3, length), dtype=torch.float32, device=where).mT)
        layer.register_buffer("factor", torch.zeros((*each, 3), dtype=torch.float32, device=where))
    elif state.delayed is not None and state.delayed is not recipe:
        # Factors for other formats or another margin: the next roll finds new ones.
        factor.zero_()
    register(layer)
    state.delayed = recipe
    if is_tracing() or layer_state.recomputing():
        # No step has it: a compiler does not come by where layers join one, nor does a copy in a reentrant checkpoint.
        state.copied, state.recorded_apart = False, True


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
    """The number of a layer that `register` has seen, which no other layer of this process has had or gets."""
    return _numbers[layer]


def _forget(number: int, known: dict[int, Any], _: object) -> None:
    known.pop(number, None)


def newest_row(history: Tensor) -> Tensor:
    """What the present step has recorded so far: [3], or [members, 3]; a view."""
    return history.select(-2, 0)


def layers() -> list[nn.Module]:
    """Every layer alive that has a history and its factors, in order of construction."""
    if not _histories:
        return []
    alive = [ref() for ref in list(_layers.values())]
    # In another thread a layer may be between its two buffers.
    buffers = [(layer, layer._buffers) for layer in alive if layer is not None]
    return [layer for layer, own in buffers if own.get("history") is not None and own.get("factor") is not None]


def saved_factors(layer: nn.Module) -> Any:
    """The factors as a forward sees them, for its backward, a tensor or a list: later rolls do not change them.

    Unset without a history and on meta.
    A forward that is run again sees what it saw first.
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
    elif factor.dim() > 1:
        factors = views(layer).factors.reshape(-1, 3).tolist()
    else:
        factors = views(layer).factors.tolist()
    if layer_state.state.replay is not None or layer_state.state.writing:
        factors = layer_state.recorded_amax(layer, "factors", factors)
    return factors


def _on_device(layer: nn.Module, factor: Tensor) -> Tensor:
    stacked = state_of(layer).stacked
    copied: Tensor | None = None if stacked is None else stacked[0].snapshot(stacked[1], factor)
    if copied is None:
        return factor.clone()
    # Wherever these factors go, whether they are set goes with them.
    copied.known_set = stacked[0].is_set(stacked[1], factor)  # type: ignore[attr-defined]
    return copied


def is_set(column: int, factors: Tensor | list[float]) -> bool:
    """True if a factor is known not to be 0, without a synchronization: one pass over the tensor is then enough.

    A GPU says so a step or two late, and anew after loading or another recipe; a write through `.data` goes unseen.

    Args:
        factors: what `saved_factors` gave.
    """
    if isinstance(factors, list):
        return factors[column] != 0.0
    known: list[bool] | None = None if is_tracing() else getattr(factors, "known_set", None)
    return known is not None and known[column]


def newest(layer: nn.Module, column: int, x: Tensor) -> Tensor | None:
    """The place where the kernel that casts x may note its amax: a view of one element, history[0, column].

    None where that is left to `record`: in compiled code, in a forward that runs again, off a GPU.
    """
    history = layer._buffers["history"]
    assert history is not None
    if is_tracing() or layer_state.replaying() or history.device != x.device:
        return None
    if history.dtype is not torch.float32 or not _launched(history):
        return None
    state = state_of(layer)
    cached = state.newest
    # A view costs the host as much as a launch.
    if cached is None or cached[0] is not history or cached[1] != history.data_ptr():
        row = history.detach()[0]
        cached = state.newest = history, history.data_ptr(), [row[i : i + 1] for i in range(3)]
    entry: Tensor = cached[2][column]
    return entry


def record(layer: nn.Module, column: int, amax: Tensor | float | None, recorded_amax: bool = False) -> None:
    """Note an amax in row 0; infinities and NaN are not noted, lest one overflow freeze the scale.

    Args:
        recorded_amax: True if the kernel that measured it has noted it, in the view that `newest` gave.
    """
    if layer_state.replaying():
        return
    if recorded_amax:
        history = layer._buffers["history"]
        if history is not None and history.is_cpu:
            views(layer).recorded = True
        return
    if isinstance(amax, float):
        seen = views(layer)
        if amax < math.inf and seen.newest[column] < amax:
            seen.newest[column] = amax
            seen.recorded = True
        return
    assert isinstance(amax, Tensor)
    history = layer._buffers["history"]
    assert history is not None
    if not is_tracing() and _launched(history) and history.device == amax.device:
        from quaver.torch.state.history import roll_gpu as kernels

        kernels.note(history, column, amax)
        if history.is_cpu:
            views(layer).recorded = True
        return
    value = torch.where(amax < math.inf, amax, 0.0).reshape(())
    history[0, column] = torch.maximum(history[0, column], value)


def record_each(layer: nn.Module, column: int, amaxes: Tensor | Sequence[float], first: int = 0) -> None:
    """`record` for members in a row, of which one that has seen nothing says 0.

    Args:
        amaxes: of each, float32 [members] or numbers.
        first: the first of these members.
    """
    if layer_state.replaying():
        return
    history = layer._buffers["history"]
    assert history is not None
    if not isinstance(amaxes, Tensor):
        seen = views(layer)
        for i, amax in enumerate(amaxes, first):
            at = 3 * i + column
            if amax < math.inf and seen.newest[at] < amax:
                seen.newest[at] = amax
                seen.recorded = True
        return
    last = first + amaxes.shape[0]
    value = torch.where(amaxes < math.inf, amaxes, 0.0).to(history.device)
    history[first:last, 0, column] = torch.maximum(history[first:last, 0, column], value)


def record_gradient(number: Tensor, amax: Tensor, first: int = 0) -> None:
    """`record` for a compiled backward, which may not write to a buffer that its forward has written to: it hands over
    the layer's number, and the write happens where the compiler does not look.

    Args:
        first: of several members, the first whose amaxes these are.
    """
    ref = _layers.get(int(number))
    layer = None if ref is None else ref()
    if layer is not None and layer._buffers.get("history") is not None:
        # Compiled layers belong to no step: see `quaver.torch.state.history.scaling_step`.
        state = state_of(layer)
        state.step, state.recorded_apart = None, True
        if state.family is not None:
            # Frozen layers that were compiled with it have no backward to come by here.
            state.family.recorded_apart = True
        if state.members:
            record_each(layer, GRAD_OUTPUT, amax, first)
        else:
            record(layer, GRAD_OUTPUT, amax)


def views(layer: nn.Module) -> _BufferViews:
    """The layer's buffers and their views, made again when the layer has other buffers."""
    buffers = layer._buffers
    history, factor = buffers["history"], buffers["factor"]
    assert history is not None and factor is not None
    state = state_of(layer)
    cached: _BufferViews | None = state.views
    if (
        cached is None
        or cached.history is not history
        or cached.factor is not factor
        or (cached.address != history.data_ptr())
    ):
        if history.dim() > 2 and not history.mT.is_contiguous():
            # As load_state_dict(assign=True) brings it: columns of several members are one matrix only as they were
            # made.
            history = buffers["history"] = history.mT.contiguous().mT
        cached = state.views = _BufferViews(history, factor)
    return cached


def _launched(history: Tensor) -> bool:
    """True if a kernel rolls and notes in a history: on a GPU, or under `only("triton")` on a CPU."""
    if history.is_cpu and "triton" not in device.asked:
        return False
    return not history.is_meta and not device.why_no_kernels(history.device)
