"""A layer's quantized weight, kept for the micro-batches of one optimizer step and no longer.

Much writes to a weight and leaves no trace: fused optimizers, collectives, FSDP's gathers, whatever shares its memory.
So a window opens with a forward in gradient mode, whether the weight requires a gradient or not, and ends with the next
step of any optimizer, or once the gradient is gone that a backward has left. Inside it the parameter, its version,
address and storage must be the same, and setting a layer's weight drops what is kept: FSDP2 sets it whenever it gathers
or frees it. A forward without gradients keeps, uses and drops nothing, unless `quaver.torch.frozen` holds its layer.

What is kept belongs to one layer in one process: it is neither copied, pickled nor part of the state dict.
"""

import threading
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import instance
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state.layer_state import graph_task_id, state_of

#: Of a storage: which object it is in C++, or without that its address.
storage_id: Callable[[Any], int] = (
    attrgetter("_cdata") if hasattr(torch.UntypedStorage, "_cdata") else torch.UntypedStorage.data_ptr
)


class _OptimizerSteps:
    """How often any optimizer has begun or ended a step since a weight was first kept, and how many were replayed."""

    count = 0
    replayed = 0
    hooked = False


#: Reentrant: `buffer` takes it inside of what holds it.
_lock = threading.RLock()


class _ParameterVersion:
    """A parameter between two changes; layers of one parameter share it.

    A parameter goes by its identity, not by a weak reference, which `torch.utils.swap_tensors` does not allow. A later
    parameter with the same identity has another storage; on the same storage only a bare write tells them apart.
    """

    __slots__ = ("address", "held", "in_parts", "layout", "parameter", "place", "steps", "storage", "used", "version")

    def __init__(self, weight: Tensor, held: bool, before: "_ParameterVersion | None" = None) -> None:
        #: Whether other ranks have parts of it too.
        self.in_parts = _is_in_parts(weight)
        memory = _memory(weight) if self.in_parts else weight
        storage = memory.untyped_storage()
        base = weight._base
        #: Its identity, negative for a view of it, or 0 once the window has ended by itself.
        self.parameter = id(weight) if base is None else -id(base)
        #: Which view: another one may begin at the same address.
        self.layout = None if base is None else (weight.shape, weight.stride())
        self.place: int = storage_id(storage)
        #: Held weakly, but held: a later storage cannot get its identity, as one can get its address.
        self.storage: StorageWeakRef = (
            before.storage if before is not None and before.place == self.place else StorageWeakRef(storage)
        )
        self.address = memory.data_ptr()
        self.version = weight._version
        #: Whether `frozen` vouches for the weight: then only replayed steps are looked at.
        self.held = held
        self.steps = _OptimizerSteps.replayed if held else _OptimizerSteps.count
        #: The backward that made the weight's gradient last, by its number; None before the first.
        self.used: int | None = None

    def holds(self, weight: Tensor) -> bool:
        """Whether nothing says that the weight has changed since."""
        parameter = weight
        if self.parameter != id(weight):
            parameter = _parameter(weight)
            if self.parameter != -id(parameter) or self.layout != (weight.shape, weight.stride()):
                return False
        memory = _memory(weight) if self.in_parts else weight
        if (
            self.version != weight._version
            or self.address != memory.data_ptr()
            or self.place != storage_id(memory.untyped_storage())
        ):
            return False
        if self.held:
            return self.steps == _OptimizerSteps.replayed
        if self.used is not None and parameter.grad is None and self.used != graph_task_id():
            # In the backward that made it the gradient may be on its way.
            self.parameter = 0
            return False
        return self.steps == _OptimizerSteps.count


#: The open window of each parameter, by its identity; a step ends them all.
_windows: dict[int, _ParameterVersion] = {}
#: Of what is not kept.
_NONE = _ParameterVersion.__new__(_ParameterVersion)


class CachedWeight:
    """A quantized weight, and by what it is recognized; a forward hands it to its backward."""

    __slots__ = ("factor", "quantized", "ready", "spec", "window", "written")

    def __init__(
        self, quantized: Any, window: _ParameterVersion = _NONE, spec: QuantSpec | None = None, factor: Any = 0.0
    ) -> None:
        #: A `Quantized`, or a `quaver.torch.numerics.grouped.WeightStack`. None once it was freed: a unit of FSDP's
        #: holds no codes between forward and backward.
        self.quantized: Any = quantized
        self.window = window
        self.spec = spec
        self.factor = factor
        #: What an implementation has made of it; it goes with it.
        self.ready: Any = None
        #: Of a GPU's: `quaver.torch.backends.gpu.buffers.EntryByStream`.
        self.written: Any = None

    def free(self) -> None:
        if self.written is not None:
            self.written.free()
        self.quantized = self.ready = self.spec = self.written = None


class _LayerCache:
    """What one layer keeps."""

    __slots__ = ("codes", "forwards", "frozen", "held", "now", "seen", "window")

    def __init__(self) -> None:
        #: Entries by side ("fprop" or "dgrad"): of the window, and while `frozen` holds the layer.
        self.window: dict[str, CachedWeight] = {}
        self.held: dict[str, CachedWeight] = {}
        #: One of the two.
        self.now = self.window
        #: How many `frozen` hold the layer.
        self.frozen = 0
        #: The operand that a weight of codes is: a view of it.
        self.codes: Quantized | None = None
        #: The weight that forwards without gradients have quantized, and how many have.
        self.seen: tuple[int, ...] = ()
        self.forwards = 0

    def drop(self) -> None:
        self.window.clear()
        self.held.clear()
        self.codes = None


def buffer(layer: nn.Module) -> _LayerCache:
    """What a layer keeps."""
    state = state_of(layer)
    if state.weights is None:
        with _lock:
            state.weights = state.weights or _LayerCache()
    kept: _LayerCache = state.weights
    return kept


def lookup(
    layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: Any, training: bool = True
) -> CachedWeight | None:
    """What is kept for a side ("fprop" or "dgrad"), or None where the weight, spec or factor may have changed.

    Args:
        factor: the weight's encode factor, or what else stands for it.
        training: whether the forward that asks runs, or ran, in gradient mode.
    """
    # Without a call: each forward asks.
    kept: _LayerCache | None = layer._state.weights  # type: ignore[union-attr, assignment]
    if kept is None:
        return None
    if kept.frozen:
        if training:
            look(layer, weight)
    elif not training:
        return None
    entry = kept.now.get(side)
    if entry is None or entry.spec is not spec or entry.factor != factor or not entry.window.holds(weight):
        return None
    return entry if entry.written is None else entry.written.on_current_stream(entry)


def begin(layer: nn.Module, weight: Tensor, training: bool = True) -> _ParameterVersion | None:
    """The window that operands of the present weight belong to.

    It is taken before the weight is read, so that what another thread writes or holds meanwhile is seen. None where
    nothing would show a change of the weight, or the forward has no gradients.
    """
    held = frozen(layer)
    if not (training or held) or not can_keep(layer, weight):
        return None
    if not _OptimizerSteps.hooked:
        _OptimizerSteps.hooked = True
        register_optimizer_step_pre_hook(_count)
        register_optimizer_step_post_hook(_count)
    return _window(weight, held)


def keep(
    layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: Any, q: Any, window: _ParameterVersion | None
) -> CachedWeight | None:
    """Keep an operand in what `begin` gave; None where it gave nothing."""
    if window is None:
        return None
    entry = CachedWeight(q, window, spec, factor)
    if weight.is_cuda:
        from quaver.torch.backends.gpu.buffers import EntryByStream

        entry.written = EntryByStream(entry, weight.device)
    kept = buffer(layer)
    (kept.held if window.held else kept.window)[side] = entry
    return entry


def _window(weight: Tensor, held: bool) -> _ParameterVersion:
    if held:
        return _ParameterVersion(weight, True)
    number = id(_parameter(weight))
    before = _windows.get(number)
    if before is not None and before.holds(weight):
        return before
    window = _windows[number] = _ParameterVersion(weight, False, before)
    return window


def can_keep(layer: nn.Module, weight: Tensor) -> bool:
    """Whether changes of the weight can be seen, and what is made now outlives the mode it is made in."""
    return _can_be_seen(weight) and (frozen(layer) or not torch.is_inference_mode_enabled())


def _can_be_seen(weight: Tensor) -> bool:
    """Whether the weight is a plain parameter, or all of one transposed, or a DTensor: whose version tells of writes to
    its part, and whose part of the address."""
    parameter = _parameter(weight)
    whole = parameter is weight or parameter.numel() == weight.numel()
    known = type(parameter) is nn.Parameter or (parameter is weight and _is_in_parts(weight))
    return known and whole and not weight.is_inference()


def _is_in_parts(weight: Tensor) -> bool:
    """Whether a weight is a DTensor."""
    return type(weight) is not nn.Parameter and getattr(weight, "device_mesh", None) is not None


def _memory(weight: Any) -> Tensor:
    """The part of a DTensor that is here: the very tensor that the DTensor holds."""
    with torch.no_grad():
        part: Tensor = weight.to_local()
    return part


def _parameter(weight: Tensor) -> Tensor:
    """The parameter itself of a weight that is a view of one, as of a layer that holds its weight transposed."""
    base = weight._base
    return weight if base is None else base


def used(layer: nn.Module) -> None:
    """Note that a backward has made the weight's gradient: once that is gone, the weight may have changed."""
    kept: _LayerCache | None = state_of(layer).weights
    if kept is not None:
        task = graph_task_id()
        # A list, since another thread may keep the layer's weight meanwhile.
        for entry in list(kept.window.values()):
            entry.window.used = task


def look(layer: nn.Module, weight: Tensor) -> None:
    """End the layer's window if its gradient is gone: a forward that does not use the window may bring another one."""
    kept: _LayerCache | None = state_of(layer).weights
    if kept is not None:
        for entry in list(kept.window.values()):
            entry.window.holds(weight)


def refresh(model: nn.Module) -> None:
    """Drop every kept weight of a model.

    Call it after a write that leaves no trace, such as one through `.data` or `.numpy()`, while gradients are left for
    the next micro-batch or `quaver.torch.frozen` holds the model; elsewhere such writes are seen.
    """
    instance("refresh", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    for module in model.modules():
        if "_state" in module.__dict__:
            drop(module)


def drop(layer: nn.Module) -> None:
    """Drop what one layer keeps of its weight; a forward that has run leaves its codes to its backward."""
    kept: _LayerCache | None = state_of(layer).weights
    if kept is not None:
        kept.drop()


def free(layer: nn.Module) -> None:
    """Drop what one layer keeps of its weight, also what the backwards of forwards that have run would use."""
    kept: _LayerCache | None = state_of(layer).weights
    if kept is not None:
        for entry in [*list(kept.window.values()), *list(kept.held.values())]:
            entry.free()
        kept.drop()


def _count(*_: object) -> None:
    with _lock:
        _OptimizerSteps.count += 1
    _windows.clear()


def stepped() -> None:
    """Count a step that no hook has seen, as a replayed one."""
    _count()
    with _lock:
        _OptimizerSteps.replayed += 1


# For `quaver.torch.frozen`.


def frozen(layer: nn.Module) -> bool:
    """Whether a `frozen` holds the layer."""
    kept: _LayerCache | None = state_of(layer).weights
    return kept is not None and kept.frozen > 0


def freeze(layer: nn.Module) -> None:
    """Hold a layer's weight once more; what its window has kept waits."""
    with _lock:
        kept = buffer(layer)
        if not kept.frozen:
            # A forward of another thread may have kept something after the last one's end.
            kept.held.clear()
        kept.frozen += 1
        kept.now = kept.held


def thaw(layer: nn.Module) -> None:
    """Hold a layer's weight once less; the last one drops what was kept meanwhile."""
    with _lock:
        kept = buffer(layer)
        kept.frozen = max(0, kept.frozen - 1)
        if not kept.frozen:
            kept.now = kept.window
            kept.held.clear()


class _CacheHint:
    given = False


#: So many forwards without gradients that quantize the same weight are worth a hint.
FORWARDS = 100


def quantized_again(layer: nn.Module, weight: Tensor) -> None:
    """Count a forward without gradients that has quantized the weight; after `FORWARDS` of them name `frozen`, once."""
    if _CacheHint.given or not _can_be_seen(weight) or graph_task_id() != -1:
        return
    kept, seen = (
        buffer(layer),
        (
            id(_parameter(weight)),
            weight._version,
            (_memory(weight) if _is_in_parts(weight) else weight).data_ptr(),
            _OptimizerSteps.count,
        ),
    )
    if any(entry.window.holds(weight) for entry in list(kept.window.values())):
        # The layer trains meanwhile: this may be the first pass of a reentrant checkpoint.
        return
    kept.forwards = kept.forwards + 1 if kept.seen == seen else 1
    kept.seen = seen
    if kept.forwards >= FORWARDS:
        _CacheHint.given = True
        rows, columns = weight.shape[-2:]
        warnings.warn(
            f"a {type(layer).__name__}({columns} → {rows}) has quantized the same weight in {FORWARDS} forwards "
            "without gradients; run them inside `with quaver.torch.frozen(model):`, which quantizes it once",
            stacklevel=2,
        )
