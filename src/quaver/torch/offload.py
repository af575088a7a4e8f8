"""`offload`: activations of chosen layers in pinned host memory between forward and backward.

    forward of layer i     records what autograd saves, by storage; a shared input is one storage
    end of layer i         a side stream copies the storages to the host, behind the work of layer i
    end of layer i + 2     the compute stream waits for that copy, and the device memory of layer i is free
    end of the model       the same for the last layers, so that backward finds the memory free
    backward of layer i    waits for its copy back, and starts that of layer i - 1

The host never waits. A storage comes back with its bytes, and its tensors with their offsets and strides, so results
are bit-equal. Operands in eight bits are moved as codes and scales. Parameters and buffers stay on the device.

Autograd does not compare versions of tensors under saved-tensor hooks, so they are compared here: a write between a
save and the end of the copy raises in backward.
"""

import math
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from quaver.recipes.text import check_instance, suggest
from quaver.torch.backends.gpu import capture
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.selective_checkpoint import hide_from_policies
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.layer_state import recomputing
from quaver.torch.state.weight_cache import storage_id

#: Bytes from which a storage is moved; smaller ones cost more in launches than they save.
SMALLEST = 4096
#: Layers whose copies to the host may run at a time.
IN_FLIGHT = 2
#: Attribute of a storage that stays on the device.
MARK = "stays_on_device"
#: Autograd nodes between a parameter and its casts and views.
OF_WEIGHTS = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Alias", "Slice")
)
#: Why one compiled graph cannot have it, and what to do.
COMPILE_INSIDE = (
    "quaver.torch.offload moves saved tensors between layers, in eager mode: compile the layers, or modules in them, "
    "one by one (layers[i] = torch.compile(layers[i]))"
)


# ---- streams and pinned memory ----


class Transfers:
    """Streams and memory of CUDA devices; tests simulate them on a CPU.

    Args:
        stream: side stream of its device, on which copies run in order; others are created.
    """

    #: Type of the devices whose tensors are moved.
    device_type = "cuda"

    def __init__(self, stream: "torch.cuda.Stream | None" = None) -> None:
        self.side = {} if stream is None else {stream.device: stream}

    def allocate_host(self, size: int) -> Tensor:
        """Return `size` bytes of pinned memory; raises RuntimeError if there is not as much."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Return `size` bytes of device memory in the order of the compute stream."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def record(self, device: torch.device) -> Any:
        """Return an event behind all work of the compute stream so far."""
        return torch.cuda.current_stream(device).record_event()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: Any) -> Any:
        """Copy each (target, source) on the side stream after an event; return the event of its end."""
        if device not in self.side:
            self.side[device] = torch.cuda.Stream(device)
        side = self.side[device]
        side.wait_event(after)
        with torch.cuda.stream(side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return side.record_event()

    def wait(self, event: Any, device: torch.device) -> None:
        """Let later work of the compute stream wait for an event."""
        torch.cuda.current_stream(device).wait_event(event)


class HostPool:
    """Pinned buffers up to a budget in bytes, in powers of two, to which torch rounds them too.

    A buffer can be taken as soon as it was given back, while copies still read it: all copies of a device run on one
    stream in order. torch's own cache of pinned memory waits until events have passed, and pins more if the host is
    ahead.
    """

    def __init__(self, transfers: Any, budget: float) -> None:
        self.transfers, self.budget = transfers, budget
        self.allocated = 0
        self.failed = False
        #: By device and size.
        self.free: dict[tuple[torch.device, int], list[Tensor]] = {}

    @staticmethod
    def rounded(size: int) -> int:
        """Return the bytes of a buffer for `size` bytes."""
        return 1 << (size - 1).bit_length()

    def take(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return a buffer of at least that many bytes for each size, or nothing if there is no memory for all."""
        wanted = Counter((device, self.rounded(size)) for size in sizes)
        missing = [key[1] for key, count in wanted.items() for _ in range(count - len(self.free.get(key, ())))]
        if self.allocated + sum(missing) > self.budget:
            # Unused sizes, such as those of another sequence length.
            for key, buffers in self.free.items():
                while len(buffers) > wanted[key]:
                    self.allocated -= buffers.pop().numel()
        if self.allocated + sum(missing) > self.budget:
            return []
        for size in missing:
            try:
                self.give(self.transfers.allocate_host(size), device)
            except (RuntimeError, MemoryError) as error:
                self._warn(error)
                return []
            self.allocated += size
        return [self.free[device, self.rounded(size)].pop() for size in sizes]

    def give(self, buffer: Tensor, device: torch.device) -> None:
        """Take a buffer back that a device has used."""
        self.free.setdefault((device, buffer.numel()), []).append(buffer)

    def _warn(self, error: BaseException) -> None:
        if not self.failed:
            first_line = str(error).partition("\n")[0]
            warnings.warn(
                f"no more pinned memory than {self.allocated / 1e9:.3g} GB ({first_line}): quaver.torch.offload leaves "
                "other layers on the device; pass a smaller budget_gb, or allow more locked memory",
                stacklevel=2,
            )
        self.failed = True


# ---- saved tensors ----


class Slot:
    """A storage that autograd saves: on the device, on the host, or on its way."""

    def __init__(self, x: Tensor, owner: "Offloader") -> None:
        storage = x.untyped_storage()
        self.owner, self.device, self.size, self.version = owner, x.device, storage.nbytes(), x._version
        #: Prevents that a later storage gets this identity.
        self.storage_ref = StorageWeakRef(storage)
        #: A tensor of the storage while it is on the device. It shares the version counter.
        self.source: Tensor | None = x.detach()
        #: Version that a write has left before the copy was over, else None.
        self.written: int | None = None
        self.host: Tensor | None = None
        #: The storage after its copy back, and the event of that copy.
        self.back: Tensor | None = None
        self.arrival: Any = None
        #: Number of saved tensors in this storage, and of those that backward has read from `back`.
        self.saves = self.reads = 0

    def check(self) -> None:
        """Record a write to the source since it was saved."""
        if self.source is not None and self.source._version != self.version:
            self.written = self.source._version

    def __del__(self) -> None:
        if self.arrival is not None:
            # The compute stream may use the memory again at once.
            self.owner.transfers.wait(self.arrival, self.device)
        if self.host is not None:
            self.owner.pool.give(self.host, self.device)


class LayerRun:
    """Slots of one forward of a layer."""

    def __init__(self, name: str, key: object, inputs: Iterable[Tensor] = (), weights: Iterable[int] = ()) -> None:
        self.name = name
        #: Identifies the layer.
        self.key = key
        #: Storages of the arguments. The references prevent that later storages get their identities.
        self.inputs = {_storage_of(x): StorageWeakRef(x.untyped_storage()) for x in inputs if _is_plain(x)}
        #: Storages of parameters and buffers.
        self.weights = set(weights)
        self.slots: list[weakref.ref[Slot]] = []
        #: The run before, whose backward comes next.
        self.previous: weakref.ref[LayerRun] | None = None

    def live(self) -> list[Slot]:
        """Return the slots that backward may still need, each once."""
        return list(dict.fromkeys(slot for each in self.slots if (slot := each()) is not None))


class SavedTensor:
    """Object that autograd saves instead of a tensor: holds the tensor, or its slot and layout."""

    __slots__ = ("__weakref__", "layer", "layout", "slot", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # The result of the node that saves it would form a cycle with the node.
        self.tensor: Tensor | None = x if x.grad_fn is None else x.detach()
        self.version = x._version
        self.slot: Slot | None = None
        self.layer: LayerRun | None = None
        self.layout: Any = None

    def in_storage(self, x: Tensor) -> Tensor:
        """Return the tensor, in the storage of x."""
        dtype, *layout = self.layout
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), *layout)


class _OpenLayers(threading.local):
    """Layers whose forward runs in this thread, innermost last; the last that ended, and what was saved since then."""

    def __init__(self) -> None:
        self.runs: list[LayerRun] = []
        self.last: LayerRun | None = None
        self.between: list[weakref.ref[SavedTensor]] = []


class Offloader:
    """Moves what autograd saves in layers, whose begin and end it is told.

    Args:
        transfers: streams and memory.
        budget: bytes of pinned memory.
    """

    def __init__(self, transfers: Any, budget: float = math.inf) -> None:
        self.transfers = transfers
        self.pool = HostPool(transfers, budget)
        self.open = _OpenLayers()
        self.slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        #: Copies to the host for which the compute stream has not waited: slots, event and device.
        self.in_flight: deque[tuple[list[Slot], Any, torch.device]] = deque()
        #: The layer whose backward runs.
        self.in_backward: weakref.ref[LayerRun] | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which autograd saves tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(_eager(self.pack), _eager(self.unpack))

    # -- forward --

    def begin(self, run: LayerRun) -> None:
        """Count what is saved from now on for a layer."""
        if capture.is_captured_or_rehearsed(_current_device(self.transfers.device_type)):
            raise RuntimeError(
                f"layer {run.name!r} runs inside a CUDA graph (torch.cuda.graph, quaver.torch.CapturedStep), where "
                "quaver.torch.offload cannot copy; leave one of the two out"
            )
        self.open.runs.append(run)
        between, self.open.between = self.open.between, []
        # A checkpoint around the layer has saved its inputs before the layer began.
        for each in between:
            saved = each()
            if saved is not None and saved.tensor is not None and _storage_of(saved.tensor) in run.inputs:
                self._move(saved, run)

    def end(self, key: object) -> None:
        """Start the copies of a layer to the host; without effect if it has not begun."""
        if not any(run.key is key for run in self.open.runs):
            return
        # Inner layers that raised may not have ended.
        while (run := self.open.runs.pop()).key is not key:
            pass
        if self.open.last is not None:
            run.previous = weakref.ref(self.open.last)
        self.open.last = run
        self._send(run, run.live())

    def finish(self, result: Any) -> None:
        """Free the memory of the last layers, and start their copies back when a gradient of the result arrives."""
        while self.in_flight:
            self._release()
        x = next((x for x in _tensors(result) if x.requires_grad), None)
        if self.open.last is not None and x is not None:
            x.register_hook(partial(self._fetch_if_alive, weakref.ref(self.open.last)))

    def pack(self, x: Tensor) -> SavedTensor:
        """Return what autograd saves."""
        saved, runs, last = SavedTensor(x), self.open.runs, self.open.last
        if runs and isinstance(x, QuantizedTensor):
            # Layers save its codes next to it.
            runs[-1].weights.update(_storages(x))
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
            self.open.between.append(weakref.ref(saved))
        return saved

    def _is_movable(self, x: Tensor) -> bool:
        if not _is_plain(x) or x.device.type != self.transfers.device_type or x.is_conj() or x.is_neg():
            return False
        storage = x.untyped_storage()
        return storage.nbytes() >= SMALLEST and not hasattr(storage, MARK) and not _is_weight(x)

    @hide_from_policies
    def _move(self, saved: SavedTensor, run: LayerRun) -> Slot:
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
        """Start the copies of slots to the host; leave all on the device if the host has no memory for them."""
        slots = [slot for slot in slots if slot.host is None and slot.source is not None]
        need = sum(self.pool.rounded(slot.size) for slot in slots)
        if need > self.pool.budget:
            raise ValueError(
                f"budget_gb is {self.pool.budget / 1e9:.3g}, and layer {run.name!r} alone saves {need / 1e9:.3g} GB; "
                "pass a larger budget_gb, or smaller layers"
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
        """Wait for the oldest copies to the host, and free their sources unless `keep`."""
        slots, event, device = self.in_flight.popleft()
        self.transfers.wait(event, device)
        for slot in slots:
            slot.check()
            if not keep:
                slot.source = None

    # -- backward --

    def unpack(self, saved: SavedTensor) -> Tensor:
        """Return the tensor that was saved."""
        x, slot, run = saved.tensor, saved.slot, saved.layer
        if slot is None or run is None:
            assert x is not None
            if x._version != saved.version:
                _raise_written(x.dtype, x.shape, x._version, saved.version)
            return x
        # Backward begins: what is still on the device need not come back.
        while self.in_flight:
            self._release(keep=True)
        slot.check()
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
            slot.back, slot.reads = None, 0
        return x

    def _fetch_if_alive(self, run: "weakref.ref[LayerRun]", *_: Any) -> None:
        found = run()
        if found is not None:
            self._fetch(found)

    def _fetch(self, run: LayerRun) -> None:
        """Start the copies of a layer back to the device."""
        slots = [s for s in run.live() if s.host is not None and s.source is None and s.back is None]
        with torch.no_grad():
            for device, own in _by_device(slots):
                pairs = []
                for slot in own:
                    slot.back = self.transfers.allocate(slot.size, device)
                    pairs.append((slot.back, slot.host[: slot.size]))  # type: ignore[index]
                event = self.transfers.copy(pairs, device, self.transfers.record(device))
                for slot in own:
                    slot.arrival = event


# ---- the context ----


class offload:
    """Move what backward needs of a model's layers to pinned host memory after their forward, and back in time.

    Use it around forward, around forward and backward, or around a whole loop; backward works after the exit too.
    Create it once and enter it for every step, so that memory is pinned once. Losses and gradients are bit-equal. A
    layer that runs as a checkpoint (`quaver.torch.checkpoint`, torch.utils.checkpoint) moves the inputs of the
    checkpoint, and the rest is recomputed. Only tensors on CUDA devices are moved.

    Args:
        model: module that is called.
        layers: names of layers, as fnmatch patterns ("encoder.*"), or modules; of modules inside each other the
            outermost. By default the members of each outermost nn.ModuleList: the repeated layers of a transformer.
        budget_gb: pinned memory that may be used, in 10^9 bytes; None for no limit. The first layers of a forward are
            moved, and those beyond the budget stay on the device: backward needs the last ones first.

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
        #: Modules by name; those inside of other chosen ones are left out.
        self.layers = {n: m for n, m in chosen.items() if not any(_is_inside(n, other) for other in chosen)}
        self._offloader = Offloader(_transfers or Transfers(), 1e9 * budget)
        self._entered: list[Any] = []

    def __enter__(self) -> "offload":
        if is_tracing():
            raise RuntimeError(f"entered in a compiled function, but {COMPILE_INSIDE}")
        if self._entered:
            raise RuntimeError("this quaver.torch.offload is already entered; enter it once")
        _check_not_compiled(self.model, self.layers)
        for name, module in self.layers.items():
            self._entered += [
                module.register_forward_pre_hook(_eager(partial(self._begin, name)), with_kwargs=True),
                module.register_forward_hook(_eager(self._end), always_call=True),
            ]
        self._entered.append(self.model.register_forward_hook(_eager(self._finish)))
        hooks = self._offloader.hooks()
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
        while self._entered:
            self._entered.pop().remove()
        of_thread = self._offloader.open
        if of_thread.last is None and of_thread.between and error[0] is None:
            warnings.warn(
                f"tensors were saved inside quaver.torch.offload, but none of its {len(self.layers)} layers ran, so "
                "nothing was moved; call the model that was passed, and compile it after entering, layer by layer",
                stacklevel=2,
            )
        self._offloader.open = _OpenLayers()
        self._offloader.finish(None)

    def _begin(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A copy of the model keeps its hooks after the exit.
        if self._entered and not recomputing():
            weights = _of_module(module) if torch.is_grad_enabled() else ()
            self._offloader.begin(LayerRun(name, module, _tensors((args, kwargs)), weights))

    def _end(self, module: nn.Module, *_: Any) -> None:
        if not recomputing():
            self._offloader.end(module)

    def _finish(self, module: nn.Module, args: Any, result: Any) -> None:
        if not recomputing():
            self._offloader.finish(result)


def stay_on_device(*tensors: Tensor | None) -> None:
    """Mark the storages of tensors, which `offload` then never moves."""
    for x in tensors:
        for part in () if x is None else x.tensors() if isinstance(x, QuantizedTensor) else (x,):
            setattr(part.untyped_storage(), MARK, True)


# ---- layers, weights and tensors ----


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace."""
    # Not a decorator, because it imports the compiler.
    return torch.compiler.disable(function, reason=COMPILE_INSIDE)


def _chosen(model: nn.Module, layers: str | Iterable[str | nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the chosen layers.

    Raises:
        ValueError: a pattern matches none, a module is not in the model, or there are no repeated layers.
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
    for each in (layers,) if isinstance(layers, str) else layers:
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
    """Return True if a module is inside of another one, by their names."""
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


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout is torch.strided


def _is_weight(x: Tensor) -> bool:
    """Return True for a parameter, its views and its casts."""
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
        return True
    node = x.grad_fn
    while node is not None and node.name() in OF_WEIGHTS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _of_module(module: nn.Module) -> Iterator[int]:
    """Yield the storages of a module's parameters and buffers."""
    for x in (*module.parameters(), *module.buffers()):
        yield from _storages(x.to_local() if hasattr(x, "to_local") else x)


def _storages(x: Tensor) -> list[int]:
    return [*map(_storage_of, x.tensors() if isinstance(x, QuantizedTensor) else (x,))]


def _storage_of(x: Tensor) -> int:
    return storage_id(x.untyped_storage())


def _by_device(slots: Sequence[Slot]) -> Iterator[tuple[torch.device, list[Slot]]]:
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
