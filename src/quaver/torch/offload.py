"""`offload`: activations of chosen layers in pinned host memory between forward and backward.

    forward of layer i     records the storages of all tensors that autograd saves, each storage once
    end of layer i         a side stream copies the storages to the host, after the work of layer i
    end of layer i + 2     the compute stream waits for that copy, then layer i's storages are freed
    end of the model       the same for the last two layers, so that their memory is free when backward begins
    backward of layer i    waits for the copy back of layer i, and starts that of layer i - 1

The host never waits. Storages are copied as bytes, and tensors are views of them with the same offsets and strides, so
results are bit-equal. Quantized operands are moved as codes and scales. Parameters and buffers stay on the device.

Under saved-tensor hooks autograd does not compare version counters. This module does: an in-place write between the
save and the end of the copy raises in backward.
"""

import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from quaver.recipes.text import check_instance, suggest
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.host_memory import HostPool, Transfers
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.quantized_tensor import QuantizedTensor, nested_tensors
from quaver.torch.state.layer_state import recomputing
from quaver.torch.state.selective_checkpoint import hide_from_policies
from quaver.torch.state.weight_cache import storage_id

#: Smallest storage that is moved, in bytes; smaller ones cost more in launches than they save.
SMALLEST = 4096
#: Number of layers whose copies to the host may be in flight.
IN_FLIGHT = 2
#: Attribute that `stay_on_device` sets on a storage.
MARK = "stays_on_device"
#: Autograd nodes that cast or view a tensor: a weight is looked for behind them.
CASTS_AND_VIEWS = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Alias", "Slice")
)
#: Error message if layers would be part of a compiled graph.
COMPILE_INSIDE = (
    "quaver.torch.offload moves saved tensors between layers, in eager mode: compile the layers, or modules in them, "
    "one by one (layers[i] = torch.compile(layers[i]))"
)


# ---- saved tensors ----


class Slot:
    """A storage that autograd saves: on the device, on the host, or being copied."""

    def __init__(self, x: Tensor, owner: "Offloader") -> None:
        storage = x.untyped_storage()
        self.owner, self.device, self.size, self.version = owner, x.device, storage.nbytes(), x._version
        #: While this weak reference exists, no new storage can get the same `storage_id`.
        self.storage_ref = StorageWeakRef(storage)
        #: A tensor in the storage, with its version counter; None once the storage is on the host.
        self.source: Tensor | None = x.detach()
        #: Version after an in-place write between the save and the end of the copy, else None.
        self.written: int | None = None
        self.host: Tensor | None = None
        #: Bytes on the device after the copy back, and the event at the end of that copy.
        self.back: Tensor | None = None
        self.arrival: Any = None
        #: Number of saved tensors in this storage, and how many of them backward has read from `back`.
        self.saves = self.reads = 0

    def record_write(self) -> None:
        """Set `written` if there was an in-place write to the source since it was saved."""
        if self.source is not None and self.source._version != self.version:
            self.written = self.source._version

    def __del__(self) -> None:
        if self.arrival is not None:
            # The allocator may give the memory of `back` to the compute stream at once.
            self.owner.transfers.wait(self.arrival, self.device)
        if self.host is not None:
            self.owner.pool.give(self.host, self.device)


class LayerRun:
    """Slots of one forward of a layer."""

    def __init__(self, name: str, key: object, inputs: Iterable[Tensor] = (), weights: Iterable[int] = ()) -> None:
        self.name = name
        #: Object that `Offloader.end` is called with, such as the layer's module.
        self.key = key
        #: Storages of the layer's arguments, by id. The weak references keep the ids from reuse.
        self.inputs = {_storage_of(x): StorageWeakRef(x.untyped_storage()) for x in inputs if _is_plain(x)}
        #: Ids of the storages of parameters and buffers.
        self.weights = set(weights)
        self.slots: list[weakref.ref[Slot]] = []
        #: The preceding run of this thread that saved anything; its backward follows this one's.
        self.previous: weakref.ref[LayerRun] | None = None

    def newest(self) -> "weakref.ref[LayerRun] | None":
        """Return this run if it has saved anything, else the run before."""
        return weakref.ref(self) if self.slots else self.previous

    def live(self) -> list[Slot]:
        """Return the slots that autograd still refers to, each once."""
        return list(dict.fromkeys(slot for each in self.slots if (slot := each()) is not None))


class SavedTensor:
    """Object that autograd saves in place of a tensor: either the tensor, or its slot and layout."""

    __slots__ = ("__weakref__", "layer", "layout", "slot", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # A node that saves its own result would form a reference cycle with it.
        self.tensor: Tensor | None = x if x.grad_fn is None else x.detach()
        self.version = x._version
        self.slot: Slot | None = None
        self.layer: LayerRun | None = None
        #: dtype, storage offset, shape and strides.
        self.layout: Any = None

    def in_storage(self, x: Tensor) -> Tensor:
        """Return the saved tensor as a view of the storage of x."""
        dtype, *layout = self.layout
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), *layout)


class _OpenLayers(threading.local):
    """Layers whose forward runs in this thread, innermost last; the last that ended; what was saved since then."""

    def __init__(self) -> None:
        self.runs: list[LayerRun] = []
        self.last: LayerRun | None = None
        #: Whether autograd has saved a tensor here.
        self.saved = False
        #: Whether it could have been moved, but was saved outside of layers.
        self.outside = False
        self.between: weakref.WeakSet[SavedTensor] = weakref.WeakSet()


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that one thread runs at a time."""

    @wraps(method)
    def locked(self: "Offloader", *args: Any) -> Any:
        with self.lock:
            return method(self, *args)

    return locked


class Offloader:
    """Moves the tensors that autograd saves between calls of `begin` and `end`, which mark a layer's forward.

    Args:
        transfers: streams, copies and memory, as `Transfers`.
        budget: bytes of pinned memory that may be used.
    """

    def __init__(self, transfers: Any, budget: float = math.inf) -> None:
        self.transfers = transfers
        self.pool = HostPool(transfers, budget)
        #: Autograd runs a thread for each device, which read slots of the same layers.
        self.lock = threading.RLock()
        self.open = _OpenLayers()
        self.slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        #: Copies to the host that the compute stream has not waited for, oldest first: slots, event and device.
        self.in_flight: deque[tuple[list[Slot], Any, torch.device]] = deque()
        #: The layer whose saved tensor backward read last.
        self.in_backward: weakref.ref[LayerRun] | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which autograd calls `pack` and `unpack`."""
        return torch.autograd.graph.saved_tensors_hooks(_eager(self.pack), _eager(self.unpack))

    # -- forward --

    @_locked
    def begin(self, run: LayerRun) -> None:
        """Begin a layer: tensors that autograd saves until `end` are moved with it."""
        if capture.is_captured_or_rehearsed(_current_device(self.transfers.device_type)):
            raise RuntimeError(
                f"layer {run.name!r} runs inside a CUDA graph (torch.cuda.graph, quaver.torch.CapturedStep), where "
                "quaver.torch.offload cannot copy; leave one of the two out"
            )
        self.open.runs.append(run)
        between, self.open.between = self.open.between, weakref.WeakSet()
        # A checkpoint around the layer has saved its inputs before the layer began.
        for saved in between:
            if saved.tensor is not None and _storage_of(saved.tensor) in run.inputs:
                self._move(saved, run)

    @_locked
    def end(self, key: object) -> None:
        """End the layer that began with this key, and start its copies to the host; no effect if none did."""
        if not any(run.key is key for run in self.open.runs):
            return
        # Drop inner layers whose forward raised before their end.
        while (run := self.open.runs.pop()).key is not key:
            pass
        if self.open.last is not None:
            run.previous = self.open.last.newest()
        self.open.last = run
        self._send(run, run.live())

    @_locked
    def finish(self, result: Any) -> None:
        """Free the storages of the last layers. The last one's copies back start when `result` gets its gradient."""
        while self.in_flight:
            self._release()
        x = next((x for x in nested_tensors(result) if x.grad_fn is not None), None)
        newest = None if self.open.last is None else self.open.last.newest()
        if newest is not None and x is not None:
            x.register_hook(partial(self._fetch_if_alive, newest))

    @_locked
    def pack(self, x: Tensor) -> SavedTensor:
        """Return what autograd saves."""
        saved, runs, last = SavedTensor(x), self.open.runs, self.open.last
        self.open.saved = True
        if runs and isinstance(x, QuantizedTensor):
            # Layers save its codes next to it.
            runs[-1].weights.update(map(storage_id, _storages(x)))
        # A reentrant checkpoint saves tensors in backward too.
        if recomputing() or not self._is_movable(x):
            return saved
        if runs:
            if _storage_of(x) not in runs[-1].weights:
                self._move(saved, runs[-1])
        elif last is not None and _storage_of(x) in last.inputs:
            # A reentrant checkpoint around the layer saves its inputs after the layer has ended.
            self._send(last, [self._move(saved, last)])
        else:
            self.open.between.add(saved)
            self.open.outside = True
        return saved

    def _is_movable(self, x: Tensor) -> bool:
        if not _is_plain(x) or x.device.type != self.transfers.device_type or x.is_conj() or x.is_neg():
            return False
        storage = x.untyped_storage()
        return storage.nbytes() >= SMALLEST and not hasattr(storage, MARK) and not _is_weight(x)

    @hide_from_policies
    def _move(self, saved: SavedTensor, run: LayerRun) -> Slot:
        """Replace a saved tensor by the slot of its storage, and add the slot to the run."""
        x, saved.tensor = saved.tensor, None
        assert x is not None
        slot = self.slots.get(_storage_of(x))
        if slot is None or slot.version != x._version:
            slot = self.slots[_storage_of(x)] = Slot(x, self)
        slot.saves += 1
        saved.slot, saved.layer = slot, run
        saved.layout = x.dtype, x.storage_offset(), x.shape, x.stride()
        run.slots.append(weakref.ref(slot))
        return slot

    @hide_from_policies
    def _send(self, run: LayerRun, slots: Sequence[Slot]) -> None:
        """Start copies of a run's slots to the host; all slots of a device stay there if pinned memory is short."""
        slots = [slot for slot in slots if slot.host is None and slot.source is not None]
        need = sum(self.pool.rounded(slot.size) for slot in slots)
        if need > self.pool.budget:
            raise ValueError(
                f"budget_gb is {self.pool.budget / 1e9:.3g}, and layer {run.name!r} alone saves {need / 1e9:.3g} GB; "
                "pass a larger budget_gb, or smaller modules in layers"
            )
        with torch.no_grad():
            for device, own in _by_device(slots):
                buffers = self.pool.take([slot.size for slot in own], device)
                if not buffers:
                    continue
                pairs = []
                for slot, buffer in zip(own, buffers, strict=True):
                    slot.host = buffer
                    pairs.append((buffer[: slot.size], _bytes_of(slot.source)))
                event = self.transfers.copy(pairs, device, self.transfers.record(device))
                self.in_flight.append((own, event, device))
        while len(self.in_flight) > IN_FLIGHT:
            self._release()

    def _release(self, keep: bool = False) -> None:
        """Make the compute stream wait for the oldest copies to the host; free the sources unless `keep`."""
        slots, event, device = self.in_flight.popleft()
        self.transfers.wait(event, device)
        for slot in slots:
            slot.record_write()
            if not keep:
                slot.source = None

    # -- backward --

    @_locked
    def unpack(self, saved: SavedTensor) -> Tensor:
        """Return the tensor that was saved."""
        x, slot, run = saved.tensor, saved.slot, saved.layer
        if slot is None or run is None:
            # The tensor was not moved.
            assert x is not None
            if x._version != saved.version:
                _raise_written(x.dtype, x.shape, x._version, saved.version)
            return x
        # Backward begins: storages that are still on the device stay.
        while self.in_flight:
            self._release(keep=True)
        slot.record_write()
        if slot.written is not None:
            _raise_written(saved.layout[0], saved.layout[2], slot.written, slot.version)
        if self.in_backward is None or self.in_backward() is not run:
            self.in_backward = weakref.ref(run)
            self._fetch(run)
            if run.previous is not None:
                self._fetch_if_alive(run.previous)
        if slot.source is not None:
            return saved.in_storage(slot.source)
        if slot.back is None:
            self._fetch(run)
        assert slot.back is not None
        self.transfers.wait(slot.arrival, slot.device)
        x = saved.in_storage(slot.back)
        slot.reads += 1
        if slot.reads >= slot.saves:
            # All saved tensors were read; a second backward copies the storage back again.
            slot.back, slot.reads = None, 0
        return x

    @_locked
    def _fetch_if_alive(self, run: "weakref.ref[LayerRun]", *_: Any) -> None:
        found = run()
        if found is not None:
            self._fetch(found)

    def _fetch(self, run: LayerRun) -> None:
        """Start the copies of a layer's slots back to the device."""
        slots = [s for s in run.live() if s.host is not None and s.source is None and s.back is None]
        with torch.no_grad():
            for device, own in _by_device(slots):
                backs = [self.transfers.allocate(slot.size, device) for slot in own]
                pairs = [(back, slot.host[: slot.size]) for slot, back in zip(own, backs, strict=True)]  # type: ignore[index]
                event = self.transfers.copy(pairs, device, self.transfers.record(device))
                # Only now: an allocation that failed leaves nothing that looks as if it had arrived.
                for slot, back in zip(own, backs, strict=True):
                    slot.back, slot.arrival = back, event


# ---- the context ----


class offload:
    """Move what backward needs of a model's layers to pinned host memory after their forward, and back in time.

    Use it around forward, around forward and backward, or around a whole loop; backward may also run after the exit.
    Create it once and enter it for every step, so that memory is pinned once. Losses and gradients are bit-equal to
    those without it. If a layer runs in a checkpoint (`quaver.torch.checkpoint`, torch.utils.checkpoint), the
    checkpoint's inputs are moved, and the rest is recomputed. Only tensors on CUDA devices are moved.

    Args:
        model: the module that is called.
        layers: names of layers, as fnmatch patterns ("encoder.*"), or modules; of nested modules the outermost is
            chosen. Default: the members of each outermost nn.ModuleList, which are a transformer's repeated layers.
        budget_gb: pinned memory that may be used, in 10^9 bytes; None for no limit. The first layers of a forward are
            moved, and those beyond the budget stay on the device, since backward needs the last layers first.

    Warns:
        UserWarning: none of the layers ran, or other hooks of saved tensors are inside, so that nothing is moved.

    Raises:
        ValueError: no layer matches, a compiled module has chosen layers inside, or the budget is not positive; in
            forward: the budget is smaller than what one layer saves.
        RuntimeError: inside a CUDA graph or a compiled function, or entered twice.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Iterable[str | nn.Module] | None = None,
        budget_gb: float | None = None,
        _transfers: Any = None,
    ) -> None:
        check_instance("offload", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
        budget = math.inf if budget_gb is None else budget_gb
        if not budget > 0:
            raise ValueError(f"budget_gb is {budget_gb}; pass the pinned memory that may be used, such as 64")
        self.model = model
        chosen = dict(_chosen(model, layers))
        #: Chosen modules by name, without those inside another one.
        self.layers = {n: m for n, m in chosen.items() if not any(_is_inside(n, other) for other in chosen)}
        self._offloader = Offloader(_transfers or Transfers(), 1e9 * budget)
        self._entered: list[Any] = []

    def __enter__(self) -> "offload":
        if is_tracing():
            raise RuntimeError(f"entered in a compiled function, but {COMPILE_INSIDE}")
        if self._entered:
            raise RuntimeError("this quaver.torch.offload is already entered; enter it once")
        _check_not_compiled(self.model, self.layers)
        # Layers may get those of other modules as arguments, such as tables of rotary embeddings.
        stay_on_device(*self.model.buffers())
        # First, because torch refuses hooks of saved tensors in some functions.
        hooks = self._offloader.hooks()
        hooks.__enter__()
        self._entered.append(hooks)
        for name, module in self.layers.items():
            self._entered += [
                module.register_forward_pre_hook(_eager(partial(self._begin, name)), with_kwargs=True),
                module.register_forward_hook(_eager(self._end), always_call=True),
            ]
        self._entered.append(self.model.register_forward_hook(_eager(self._finish)))
        return self

    def __exit__(self, *error: Any) -> None:
        hooks, *handles = self._entered
        self._entered.clear()
        hooks.__exit__(*error)
        for handle in handles:
            handle.remove()
        of_thread = self._offloader.open
        if of_thread.last is None and of_thread.outside and error[0] is None:
            warnings.warn(
                f"tensors were saved inside quaver.torch.offload, but none of its {len(self.layers)} layers ran, so "
                "nothing was moved; call the model that was passed, and compile it after entering, layer by layer",
                stacklevel=2,
            )
        self._offloader.open = _OpenLayers()
        self._offloader.finish(None)

    def _begin(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A deep copy of the model still has these hooks after the exit.
        if self._entered and not recomputing():
            weights = _storages_of_module(module) if torch.is_grad_enabled() else ()
            self._offloader.begin(LayerRun(name, module, nested_tensors((args, kwargs)), weights))

    def _end(self, module: nn.Module, *_: Any) -> None:
        if not recomputing():
            self._offloader.end(module)

    def _finish(self, module: nn.Module, args: Any, result: Any) -> None:
        if not recomputing():
            self._offloader.finish(result)
            of_thread = self._offloader.open
            if (
                of_thread.last is not None
                and not of_thread.saved
                and any(x.requires_grad for x in nested_tensors(result))
            ):
                warnings.warn(
                    "layers of quaver.torch.offload ran, but autograd saved nothing there, so nothing was moved: other "
                    "hooks of saved tensors are inside, such as a second offload, or forward runs in another thread; "
                    "enter quaver.torch.offload last, in the thread of forward",
                    stacklevel=2,
                )


def stay_on_device(*tensors: Tensor | None) -> None:
    """Mark the storages of tensors, so that `offload` never moves them."""
    for x in tensors:
        for storage in () if x is None else _storages(x):
            setattr(storage, MARK, True)


# ---- layers, weights and tensors ----


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace."""
    # Called when hooks are made, because `disable` imports the compiler: as a decorator it would do so at import.
    return torch.compiler.disable(function, reason=COMPILE_INSIDE)


def _chosen(model: nn.Module, layers: str | Iterable[str | nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the chosen layers.

    Raises:
        ValueError: a pattern matches none, a module is not in the model, or there are no layers.
        TypeError: a single module, or another object.
    """
    names = {module: name for name, module in model.named_modules()}
    if layers is None:
        lists = [name for module, name in names.items() if isinstance(module, nn.ModuleList)]
        outer = [name for name in lists if not any(_is_inside(name, other) for other in lists)]
        found = [module for n in outer for module in model.get_submodule(n).children()]
        if not found:
            raise ValueError(f"{type(model).__name__} has no nn.ModuleList of layers; pass layers=, names or modules")
        yield from ((names[module], module) for module in found)
        return
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is a {type(layers).__name__}; pass a list of names or modules")
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    if not layers:
        raise ValueError("layers is empty; pass names or modules, or leave quaver.torch.offload out")
    for each in layers:
        if isinstance(each, str):
            matches = [(name, module) for module, name in names.items() if name and fnmatchcase(name, each)]
            if not matches:
                raise ValueError(
                    f"no layer is named {each!r}; {suggest(each, [name for name in names.values() if name])}"
                )
            yield from matches
        elif each in names:
            yield names[each], each
        else:
            raise ValueError(f"a {type(each).__name__} in layers is not a module of the model; pass names or modules")


def _is_inside(name: str, other: str) -> bool:
    """Return True if the module named `name` is inside the one named `other`."""
    return name.startswith(f"{other}." if other else "") and name != other


def _check_not_compiled(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a compiled module has chosen layers inside."""
    for name, module in model.named_modules():
        wraps, itself = hasattr(module, "_orig_mod"), getattr(module, "_compiled_call_impl", None) is not None
        if wraps or itself:
            inside = next((n for n in layers if (n == name and itself) or _is_inside(n, name)), None)
            if inside is not None:
                raise ValueError(
                    f"{name or 'the model'} is compiled, with layer {inside!r} inside, but {COMPILE_INSIDE}"
                )


def _current_device(type: str) -> torch.device:
    index = torch.cuda.current_device() if type == "cuda" and torch.cuda.is_available() else None
    return torch.device("cpu") if index is None else torch.device(type, index)


def _is_plain(x: Tensor) -> bool:
    """Return True for a strided torch.Tensor; False for a subclass, such as a parameter."""
    return type(x) is Tensor and x.layout is torch.strided


def _is_weight(x: Tensor) -> bool:
    """Return True for a parameter, its views and its casts."""
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
        return True
    node = x.grad_fn
    while node is not None and node.name() in CASTS_AND_VIEWS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _storages_of_module(module: nn.Module) -> Iterator[int]:
    """Yield the storage ids of a module's parameters and buffers."""
    for x in (*module.parameters(), *module.buffers()):
        yield from map(storage_id, _storages(x))


def _storages(x: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor; none of a sparse one, which stays on the device, or of a lazy parameter."""
    x = x.to_local() if hasattr(x, "to_local") else x
    if nn.parameter.is_lazy(x) or x.layout is not torch.strided:
        return []
    return [each.untyped_storage() for each in (x.tensors() if isinstance(x, QuantizedTensor) else (x,))]


def _storage_of(x: Tensor) -> int:
    return storage_id(x.untyped_storage())


def _by_device(slots: Sequence[Slot]) -> Iterator[tuple[torch.device, list[Slot]]]:
    """Yield each device and its slots."""
    for device in dict.fromkeys(slot.device for slot in slots):
        yield device, [slot for slot in slots if slot.device == device]


def _bytes_of(x: Tensor | None) -> Tensor:
    """Return the storage of a tensor as bytes."""
    assert x is not None
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _raise_written(dtype: torch.dtype, shape: Sequence[int], now: int, before: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {dtype} tensor of shape {tuple(shape)} is at version {now}; expected version {before} instead, at which "
        "quaver.torch.offload saved it"
    )
