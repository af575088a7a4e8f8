"""Weight cache: the quantized weight of a layer, reused by the micro-batches of one optimizer step.

Many writes to a weight leave no trace: fused optimizers, collectives, FSDP's all-gathers, aliased memory. So a cache
window opens with a forward in gradient mode, and ends with the next step of any optimizer, or when the gradient left by
a backward is gone. Within a window the parameter and its version, address and storage must not change. Setting a
layer's weight drops its cache; FSDP2 does that at each gather and free. A forward without gradients neither reads nor
writes the cache, unless `quaver.torch.frozen` covers its layer.

A cache belongs to one layer in one process; it is not copied, pickled or saved in the state dict.
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
from quaver.recipes.text import check_instance
from quaver.torch.state.layer_state import graph_task_id, state_of

#: Returns the identity of a storage: its C++ object, or its address if torch does not expose that.
storage_id: Callable[[Any], int] = (
    attrgetter("_cdata") if hasattr(torch.UntypedStorage, "_cdata") else torch.UntypedStorage.data_ptr
)


class _OptimizerSteps:
    """Number of begins and ends of optimizer steps since a weight was first cached, and of steps that CUDA graphs have
    replayed.
    """

    count = 0
    graph_replays = 0
    hooked = False


#: Reentrant, because `cache_of` is called while it is locked.
_lock = threading.RLock()


class _ParameterVersion:
    """A parameter between two changes, shared by the layers of that parameter."""

    __slots__ = ("key", "last_backward_id", "steps", "storage", "while_frozen")

    def __init__(self, weight: Tensor, while_frozen: bool, before: "_ParameterVersion | None" = None) -> None:
        #: Result of `_key`, or None once the window has ended.
        self.key: tuple[Any, ...] | None = _key(weight)
        #: Weak reference to the storage, so that a later storage cannot reuse its identity, as it can reuse an address.
        self.storage: StorageWeakRef = (
            before.storage
            if before is not None and before.key is not None and before.key[1] == self.key[1]
            else StorageWeakRef(_memory(weight).untyped_storage())
        )
        #: True under `frozen`; then only replayed steps end the window.
        self.while_frozen = while_frozen
        self.steps = _OptimizerSteps.graph_replays if while_frozen else _OptimizerSteps.count
        #: Number of the backward that last computed the weight's gradient; None before the first.
        self.last_backward_id: int | None = None

    def is_unchanged(self, weight: Tensor) -> bool:
        """Return True if the weight has not changed since, as far as can be seen."""
        if self.key != _key(weight):
            return False
        if self.while_frozen:
            return self.steps == _OptimizerSteps.graph_replays
        if self.last_backward_id not in (None, graph_task_id()) and _parameter(weight).grad is None:
            # Inside that backward the gradient may not be accumulated yet.
            self.key = None
            return False
        return self.steps == _OptimizerSteps.count


def _key(weight: Tensor) -> tuple[Any, ...]:
    """Return what a visible change of a weight changes: its parameter, storage, address and version; a view's layout.

    The parameter's id takes the place of a weak reference, which `torch.utils.swap_tensors` does not allow. A later
    parameter with the same id has another storage.
    """
    memory, base = weight, None
    if type(weight) is not nn.Parameter:
        memory, base = _memory(weight), weight._base
    key = storage_id(memory.untyped_storage()), memory.data_ptr(), weight._version
    # Another view may begin at the same address.
    return (id(weight), *key) if base is None else (id(base), *key, weight.shape, weight.stride())


#: Open window of each parameter by id; an optimizer step clears them all.
_parameter_versions: dict[int, _ParameterVersion] = {}
#: Window of operands that are not cached.
_NONE = _ParameterVersion.__new__(_ParameterVersion)


class CachedWeight:
    """A quantized weight with the key by which it is found; a forward passes it to its backward."""

    __slots__ = ("factor", "fast_operands", "parameter_version", "quantized", "spec", "written")

    def __init__(
        self,
        quantized: Any,
        parameter_version: _ParameterVersion = _NONE,
        spec: QuantSpec | None = None,
        factor: Any = 0.0,
    ) -> None:
        #: A `Quantized`, or on a CPU the list of those of a grouped layer; None once freed, since FSDP units hold no
        #: codes between forward and backward.
        self.quantized: Any = quantized
        self.parameter_version = parameter_version
        self.spec = spec
        self.factor = factor
        #: Data derived by a plan, dropped together with the weight.
        self.fast_operands: Any = None
        #: `quaver.torch.backends.gpu.buffers.EntryByStream` for weights on a GPU.
        self.written: Any = None

    def free(self) -> None:
        if self.written is not None:
            self.written.free()
        self.quantized = self.fast_operands = self.spec = self.written = None


class _LayerCache:
    """Cached weights of one layer."""

    __slots__ = ("entries", "forwards", "frozen", "frozen_entries", "seen")

    def __init__(self) -> None:
        #: Entries by side ("fprop" or "dgrad"): those of the window, and those cached under `frozen`.
        self.entries: dict[str, CachedWeight] = {}
        self.frozen_entries: dict[str, CachedWeight] = {}
        #: Number of open `frozen` contexts that cover the layer.
        self.frozen = 0
        #: Weight that forwards without gradients have quantized, and how many forwards in a row.
        self.seen: tuple[Any, ...] = ()
        self.forwards = 0

    def drop(self) -> None:
        self.entries.clear()
        self.frozen_entries.clear()


def cache_of(layer: nn.Module) -> _LayerCache:
    """Return the cache of a layer, created if necessary."""
    state = state_of(layer)
    if state.weights is None:
        with _lock:
            state.weights = state.weights or _LayerCache()
    layer_cache: _LayerCache = state.weights
    return layer_cache


def lookup(
    layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: Any, training: bool = True
) -> CachedWeight | None:
    """Return the cached entry for a side ("fprop" or "dgrad"), or None if weight, spec or factor may have changed.

    Args:
        factor: encode factor of the weight, or another key for it.
        training: True if the forward runs, or ran, in gradient mode.
    """
    # Reads the state directly, because every forward calls this.
    layer_cache: _LayerCache | None = layer._state.weights  # type: ignore[union-attr, assignment]
    if layer_cache is None:
        return None
    entries = layer_cache.entries
    if layer_cache.frozen:
        entries = layer_cache.frozen_entries
        if training:
            expire(layer, weight)
    elif not training:
        return None
    entry = entries.get(side)
    if (
        entry is None
        or entry.spec is not spec
        or entry.factor != factor
        or not entry.parameter_version.is_unchanged(weight)
    ):
        return None
    return entry if entry.written is None else entry.written.on_current_stream(entry)


def begin(layer: nn.Module, weight: Tensor, training: bool = True) -> _ParameterVersion | None:
    """Return the window for operands of the present weight, or None if the weight must not be cached.

    Call it before reading the weight, so that concurrent writes are noticed. None if changes of the weight could not be
    seen, or for a forward without gradients.
    """
    while_frozen = frozen(layer)
    if not (training or while_frozen) or not can_cache(layer, weight):
        return None
    if not _OptimizerSteps.hooked:
        _OptimizerSteps.hooked = True
        register_optimizer_step_pre_hook(_count)
        register_optimizer_step_post_hook(_count)
    return _version_of(weight, while_frozen)


def store(
    layer: nn.Module,
    side: str,
    weight: Tensor,
    spec: QuantSpec,
    factor: Any,
    q: Any,
    parameter_version: _ParameterVersion | None,
) -> CachedWeight | None:
    """Cache an operand in the window that `begin` returned; None if that was None."""
    if parameter_version is None:
        return None
    entry = CachedWeight(q, parameter_version, spec, factor)
    if weight.is_cuda:
        from quaver.torch.backends.gpu.buffers import EntryByStream

        entry.written = EntryByStream(entry, weight.device)
    layer_cache = cache_of(layer)
    (layer_cache.frozen_entries if parameter_version.while_frozen else layer_cache.entries)[side] = entry
    return entry


def _version_of(weight: Tensor, while_frozen: bool) -> _ParameterVersion:
    if while_frozen:
        return _ParameterVersion(weight, True)
    number = id(_parameter(weight))
    before = _parameter_versions.get(number)
    if before is not None and before.is_unchanged(weight):
        return before
    parameter_version = _parameter_versions[number] = _ParameterVersion(weight, False, before)
    return parameter_version


def can_cache(layer: nn.Module, weight: Tensor) -> bool:
    """Return True if changes of the weight can be seen, and tensors created now are not inference tensors."""
    return _can_be_seen(weight) and (frozen(layer) or not torch.is_inference_mode_enabled())


def _can_be_seen(weight: Tensor) -> bool:
    """Return True if the weight is a plain parameter, a full transpose of one, or a DTensor.

    A DTensor's version counts writes to its shard, whose address is compared.
    """
    parameter = _parameter(weight)
    whole = parameter is weight or parameter.numel() == weight.numel()
    known = type(parameter) is nn.Parameter or (parameter is weight and _is_in_parts(weight))
    return known and whole and not weight.is_inference()


def _is_in_parts(weight: Tensor) -> bool:
    """Return True if the weight is a DTensor."""
    return type(weight) is not nn.Parameter and getattr(weight, "device_mesh", None) is not None


def _memory(weight: Any) -> Tensor:
    """Return the local shard of a DTensor, without a copy; any other weight unchanged."""
    if not _is_in_parts(weight):
        return weight
    with torch.no_grad():
        part: Tensor = weight.to_local()
    return part


def _parameter(weight: Tensor) -> Tensor:
    """Return the parameter if the weight is a view of one, else the weight itself."""
    base = weight._base
    return weight if base is None else base


def backward_id() -> int:
    """Return the number of the running backward; -2 for a weight gradient that is computed after its backward."""
    task = graph_task_id()
    return -2 if task == -1 else task


def record_backward(layer: nn.Module) -> None:
    """Record that a backward has computed the weight's gradient; once that is gone, the weight may have changed."""
    layer_cache: _LayerCache | None = state_of(layer).weights
    if layer_cache is not None:
        task = backward_id()
        # Copied to a list, because another thread may add entries.
        for entry in list(layer_cache.entries.values()):
            entry.parameter_version.last_backward_id = task


def expire(layer: nn.Module, weight: Tensor) -> None:
    """End the layer's window if its gradient is gone; for forwards that do not use the cache."""
    layer_cache: _LayerCache | None = state_of(layer).weights
    if layer_cache is not None:
        for entry in list(layer_cache.entries.values()):
            entry.parameter_version.is_unchanged(weight)


def expire_without_gradient(layer: nn.Module, weight: Tensor) -> None:
    """End the layer's window in a forward whose backward is not recorded, unless a gradient shows that it has run.

    Operators of compiled graphs do this: without a gradient any code may have written the weight. Inside backward the
    gradient may not be accumulated yet.
    """
    layer_cache: _LayerCache | None = state_of(layer).weights
    parameter = _parameter(weight)
    if layer_cache is not None and graph_task_id() == -1 and parameter.requires_grad and parameter.grad is None:
        layer_cache.entries.clear()


def refresh(model: nn.Module) -> None:
    """Drop the cached weights of a model.

    Call it after a write that leaves no trace, such as through `.data` or `.numpy()`, while gradients are kept for the
    next micro-batch or under `quaver.torch.frozen`. In all other cases such writes are noticed.
    """
    check_instance("refresh", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    for module in model.modules():
        if "_state" in module.__dict__:
            drop(module)


def drop(layer: nn.Module) -> None:
    """Drop a layer's cached weight; forwards that have run keep their codes for backward."""
    layer_cache: _LayerCache | None = state_of(layer).weights
    if layer_cache is not None:
        layer_cache.drop()


def free(layer: nn.Module) -> None:
    """Drop a layer's cached weight, including the codes that pending backwards would use."""
    layer_cache: _LayerCache | None = state_of(layer).weights
    if layer_cache is not None:
        for entry in [*list(layer_cache.entries.values()), *list(layer_cache.frozen_entries.values())]:
            entry.free()
        layer_cache.drop()


def _count(*_: object) -> None:
    with _lock:
        _OptimizerSteps.count += 1
    _parameter_versions.clear()


def count_step() -> None:
    """Count an optimizer step that no hook has seen, such as a replayed one."""
    _count()
    with _lock:
        _OptimizerSteps.graph_replays += 1


# ---- `quaver.torch.frozen` ----


def frozen(layer: nn.Module) -> bool:
    """Return True if `frozen` covers the layer."""
    layer_cache: _LayerCache | None = state_of(layer).weights
    return layer_cache is not None and layer_cache.frozen > 0


def freeze(layer: nn.Module) -> None:
    """Enter `frozen` for a layer; entries of its window remain for later."""
    with _lock:
        layer_cache = cache_of(layer)
        if not layer_cache.frozen:
            # A forward of another thread may have added entries after the last exit.
            layer_cache.frozen_entries.clear()
        layer_cache.frozen += 1


def thaw(layer: nn.Module) -> None:
    """Leave `frozen` for a layer; the last exit drops the entries cached meanwhile."""
    with _lock:
        layer_cache = cache_of(layer)
        layer_cache.frozen = max(0, layer_cache.frozen - 1)
        if not layer_cache.frozen:
            layer_cache.frozen_entries.clear()


class _CacheHint:
    was_shown = False


#: Number of gradient-free forwards that quantize the same weight before a hint is given.
FORWARDS = 100


def count_uncached_forward(layer: nn.Module, weight: Tensor) -> None:
    """Count forwards without gradients in a row that quantized the same unchanged weight of a layer.

    At `FORWARDS` of them warn, once per process, to use `frozen`."""
    if _CacheHint.was_shown or not _can_be_seen(weight) or graph_task_id() != -1:
        return
    layer_cache, seen = cache_of(layer), (*_key(weight), _OptimizerSteps.count)
    if any(entry.parameter_version.is_unchanged(weight) for entry in list(layer_cache.entries.values())):
        # The layer is training: this may be the first pass of a reentrant checkpoint.
        return
    layer_cache.forwards = layer_cache.forwards + 1 if layer_cache.seen == seen else 1
    layer_cache.seen = seen
    if layer_cache.forwards >= FORWARDS:
        _CacheHint.was_shown = True
        rows, columns = weight.shape[-2:]
        warnings.warn(
            f"a {type(layer).__name__}({columns} → {rows}) has quantized the same weight in {FORWARDS} forwards "
            "without gradients; run them inside `with quaver.torch.frozen(model):`, which quantizes it only once",
            stacklevel=2,
        )
