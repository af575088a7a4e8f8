"""`offload`: activations of chosen layers in pinned host memory between forward and backward.

    forward of layer i     records what autograd saves, by storage; a shared input is one storage
    end of layer i         a side stream copies the storages to the host, behind the work of layer i
    end of layer i + 2     the compute stream waits for that copy, and the device memory of layer i is free
    end of the model       the same for the last layers, so that logits and loss find the memory free
    backward of layer i    waits for its copy back, and starts that of layer i - 1

The host never waits. A moved storage has the bytes, offsets and strides that it had, so results are bit-equal. Operands
in eight bits are moved as the codes and scales that they are. Parameters and buffers stay on the device.

Autograd stops comparing versions of tensors under saved-tensor hooks, so both moved and other tensors are compared here:
a write between a save and the end of its copy raises in backward.
"""

import math
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

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


#: Why a compiled function cannot have it, and what to do.
COMPILE_INSIDE = (
    "quaver.torch.offload moves saved tensors between layers, in eager mode: compile the layers, or modules in them, "
    "one by one (layers[i] = torch.compile(layers[i]))"
)


# ---- streams and pinned memory ----


class Transfers(Protocol):
    """Streams and memory of a device; tests have an implementation that simulates them on a CPU."""

    #: Type of the devices whose tensors are moved.
    device_type: str

    def allocate_host(self, size: int) -> Tensor:
        """Return `size` bytes of pinned memory; raises RuntimeError if there are none."""

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Return `size` bytes of device memory in the order of the compute stream."""

    def record(self, device: torch.device) -> Any:
        """Return an event behind all work of the compute stream so far."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: Any) -> Any:
        """Copy each (target, source) on the side stream after an event; return the event of its end."""

    def wait(self, event: Any, device: torch.device) -> None:
        """Let later work of the compute stream wait for an event."""


class CudaTransfers:
    """`Transfers` of CUDA devices, with one side stream each, on which copies run in order."""

    device_type = "cuda"

    def __init__(self) -> None:
        self.side: dict[torch.device, torch.cuda.Stream] = {}

    def allocate_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def record(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device).record_event()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: Any) -> Any:
        side = self.side.get(device) or self.side.setdefault(device, torch.cuda.Stream(device))
        side.wait_event(after)
        with torch.cuda.stream(side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return side.record_event()

    def wait(self, event: Any, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(event)


class _HostPool:
    """Pinned buffers up to a budget in bytes.

    A buffer is used again as soon as its storage is back on the device. The copies of all users run on one stream in
    order, so a new user need not wait for the old one; torch's cache of pinned memory would query events, and allocate
    more while the host is ahead of the device. Sizes are powers of two, as torch rounds them.
    """

    def __init__(self, transfers: Transfers, budget: float) -> None:
        self.transfers, self.budget = transfers, budget
        self.allocated = 0
        self.failed = False
        self.free: dict[int, list[Tensor]] = {}

    @staticmethod
    def rounded(size: int) -> int:
        return 1 << (size - 1).bit_length()

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return a buffer of at least that many bytes for each size, or nothing if there is no memory for all."""
        wanted = Counter(map(self.rounded, sizes))
        missing = [s for s, count in wanted.items() for _ in range(count - len(self.free.get(s, ())))]
        if self.allocated + sum(missing) > self.budget:
            # Buffers of other sizes, such as those of another sequence length.
            for size, buffers in self.free.items():
                while len(buffers) > wanted[size]:
                    self.allocated -= buffers.pop().numel()
        if self.allocated + sum(missing) > self.budget:
            return []
        for size in missing:
            try:
                buffer = self.transfers.allocate_host(size)
            except (RuntimeError, MemoryError) as error:
                self._warn(error)
                return []
            self.allocated += size
            self.give(buffer)
        return [self.free[self.rounded(size)].pop() for size in sizes]

    def _warn(self, error: BaseException) -> None:
        if not self.failed:
            first_line = str(error).partition("\n")[0]
            warnings.warn(
                f"no more pinned memory than {self.allocated / 1e9:.3g} GB ({first_line}): quaver.torch.offload "
                "keeps other layers on the device; pass a smaller budget_gb, or allow more locked memory",
                stacklevel=2,
            )
        self.failed = True

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self.free.setdefault(buffer.numel(), []).append(buffer)


# ---- saved tensors ----


class _Slot:
    """A storage that autograd saves, on the device, on its way, or on the host."""

    def __init__(self, x: Tensor, owner: "offload") -> None:
        storage = x.untyped_storage()
        self.owner, self.device, self.size, self.version = owner, x.device, storage.nbytes(), x._version
        #: Keeps the identity of the storage from being used again.
        self.storage_ref = StorageWeakRef(storage)
        #: A tensor of the storage while it is on the device. It shares the version counter.
        self.source: Tensor | None = x.detach()
        #: Version that a write has left before the copy was over, else None.
        self.written: int | None = None
        self.host: Tensor | None = None
        #: The storage after its copy back, and the event of that copy.
        self.back: Tensor | None = None
        self.arrival: Any = None
        #: How many saved tensors are of this storage, and how many of them backward has read since `back` was filled.
        self.saves = self.reads = 0

    def check(self) -> None:
        """Note a write to the source since it was saved."""
        if self.source is not None and self.source._version != self.version:
            self.written = self.source._version

    def __del__(self) -> None:
        if self.arrival is not None:
            # The compute stream may use the memory again at once.
            self.owner.transfers.wait(self.arrival, self.device)
        if self.host is not None:
            self.owner.pool.give(self.host)


class _Layer:
    """The slots of one run of a layer, and the run before it."""

    def __init__(self, name: str, module: nn.Module, inputs: set[int], weights: set[int]) -> None:
        self.name, self.module, self.inputs, self.weights = name, module, inputs, weights
        self.slots: list[weakref.ref[_Slot]] = []
        self.is_over = False
        self.previous: weakref.ref[_Layer] | None = None

    def live(self) -> list[_Slot]:
        """Return the slots that backward may still need, each once."""
        return list(dict.fromkeys(slot for each in self.slots if (slot := each()) is not None))


class _Saved:
    """What autograd saves instead of a tensor: the tensor itself, or its slot and layout."""

    __slots__ = ("__weakref__", "layer", "layout", "slot", "tensor", "version")

    def __init__(self, x: Tensor) -> None:
        # A result of the node that saves it would keep the node alive.
        self.tensor: Tensor | None = x if x.grad_fn is None else x.detach()
        self.version = x._version
        self.slot: _Slot | None = None
        self.layer: _Layer | None = None
        self.layout: Any = None

    def move_to(self, slot: _Slot, layer: _Layer) -> None:
        x, self.tensor = self.tensor, None
        assert x is not None
        self.slot, self.layer = slot, layer
        self.layout = x.dtype, x.storage_offset(), x.shape, x.stride()
        slot.saves += 1
        layer.slots.append(weakref.ref(slot))

    def of(self, storage: Any, device: torch.device) -> Tensor:
        """Return the tensor in a storage."""
        dtype, *layout = self.layout
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, *layout)


def _raise_written(shape: Any, dtype: torch.dtype, now: int, before: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a {dtype} tensor of shape {tuple(shape)} is at version {now}; expected version {before} instead, with which "
        "quaver.torch.offload saved it"
    )


# ---- the context ----


class _Running(threading.local):
    """Runs of chosen layers that are open in this thread, innermost last, and the last one that ended."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self.last: _Layer | None = None
        #: Tensors saved since then, outside of layers.
        self.between: list[weakref.ref[_Saved]] = []


class offload:
    """Move what backward needs of a model's layers to pinned host memory after their forward, and back in time.

    Use it around forward, or around forward and backward, or around a whole loop; backward also works after the exit.
    Create it once and enter it for every step, so that pinned memory is allocated once. Losses and gradients are
    bit-equal. A layer that runs as a checkpoint (`quaver.torch.checkpoint`, torch.utils.checkpoint) moves the inputs of
    the checkpoint, and the rest is recomputed. Without a CUDA device in the model nothing is moved.

    Args:
        model: module that is called, or whose layers are.
        layers: names of layers, as fnmatch patterns ("encoder.*"), or modules. By default all members of the outermost
            nn.ModuleList: the repeated layers of a transformer.
        budget_gb: pinned memory that may be used, in 10^9 bytes; all that there is by default. The first layers of a
            forward are moved, and those beyond the budget stay on the device: backward needs the last ones first.

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
        budget_gb: float = math.inf,
        _transfers: Transfers | None = None,
    ) -> None:
        check_instance("offload", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
        if not budget_gb > 0:
            raise ValueError(f"budget_gb is {budget_gb}; give the pinned memory that may be used, such as 64")
        self.model = model
        self.layers = dict(_chosen(model, layers))
        self.budget = budget_gb * 1e9
        self.transfers: Any = CudaTransfers() if _transfers is None else _transfers
        self.pool = _HostPool(self.transfers, self.budget)
        self._slots: weakref.WeakValueDictionary[int, _Slot] = weakref.WeakValueDictionary()
        #: Copies to the host that the compute stream has not waited for: (slots, event, device).
        self._in_flight: deque[tuple[list[_Slot], Any, torch.device]] = deque()
        self._running = _Running()
        #: The layer whose backward runs.
        self._backward: weakref.ref[_Layer] | None = None
        self._entered: list[Any] = []

    def __enter__(self) -> "offload":
        if is_tracing():
            raise RuntimeError(f"entered in a compiled function, but {COMPILE_INSIDE}")
        if self._entered:
            raise RuntimeError("this quaver.torch.offload is already entered; enter it once")
        _check_not_compiled(self.model, self.layers)
        if not any(p.device.type == self.transfers.device_type for p in self.model.parameters()):
            return self
        for name, module in self.layers.items():
            self._entered += [
                module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
        self._entered.append(self.model.register_forward_hook(self._end_model))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(*error)
        while self._entered:
            self._entered.pop().remove()
        if self._running.last is None and self._running.between and error[:1] == (None,):
            warnings.warn(
                f"tensors were saved inside quaver.torch.offload, and none of its {len(self.layers)} layers ran, so "
                "nothing was moved; call the model that it was given, and compile it after entering, layer by layer",
                stacklevel=2,
            )
        self._running = _Running()
        while self._in_flight:
            self._release()

    # -- forward --

    @torch.compiler.disable(reason=COMPILE_INSIDE)
    def _begin(self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if recomputing():
            return
        inputs = {storage_id(x.untyped_storage()) for x in _tensors((*args, *kwargs.values())) if _is_plain(x)}
        running = self._running
        layer = _Layer(name, module, inputs, set(_weights(module)) if torch.is_grad_enabled() else set())
        for x in _tensors((*args, *kwargs.values())):
            if capture.is_captured_or_rehearsed(x.device):
                raise RuntimeError(
                    f"layer {name!r} runs inside a CUDA graph (torch.cuda.graph, quaver.torch.CapturedStep), where "
                    "quaver.torch.offload cannot copy; leave one of the two out"
                )
        running.layers.append(layer)
        between, running.between = running.between, []
        # A checkpoint around the layer has saved its inputs.
        for each in between:
            saved = each()
            if saved is not None and saved.tensor is not None and self._key(saved.tensor) in inputs:
                self._move(saved, layer)

    @torch.compiler.disable(reason=COMPILE_INSIDE)
    def _end(self, module: nn.Module, *_: Any) -> None:
        running = self._running
        if recomputing() or not any(layer.module is module for layer in running.layers):
            return
        # Layers inside whose forward raised before their hooks were called.
        while (layer := running.layers.pop()).module is not module:
            pass
        layer.is_over = True
        if running.last is not None:
            layer.previous = weakref.ref(running.last)
        running.last = layer
        self._send(layer, layer.live())

    @torch.compiler.disable(reason=COMPILE_INSIDE)
    def _end_model(self, module: nn.Module, args: Any, result: Any) -> None:
        """Free the memory of the last layers, and start their copy back when the gradient of the result arrives."""
        while self._in_flight:
            self._release()
        last = self._running.last
        if last is not None and not recomputing():
            x = next((x for x in _tensors(result) if x.requires_grad), None)
            if x is not None:
                x.register_hook(partial(self._fetch_of, weakref.ref(last)))

    @torch.compiler.disable(reason=COMPILE_INSIDE)
    def _pack(self, x: Tensor) -> _Saved:
        saved, running = _Saved(x), self._running
        if recomputing() or not self._is_movable(x):
            return saved
        if running.layers:
            if self._key(x) not in running.layers[-1].weights:
                self._move(saved, running.layers[-1])
        elif running.last is not None and self._key(x) in running.last.inputs:
            # A reentrant checkpoint around the layer saves its inputs after the layer.
            self._move(saved, running.last)
            self._send(running.last, [saved.slot])  # type: ignore[list-item]
        else:
            running.between.append(weakref.ref(saved))
        return saved

    @staticmethod
    def _key(x: Tensor) -> int:
        return storage_id(x.untyped_storage())

    def _is_movable(self, x: Tensor) -> bool:
        if not _is_plain(x) or x.device.type != self.transfers.device_type or x.is_conj() or x.is_neg():
            return False
        if x.untyped_storage().nbytes() < SMALLEST or hasattr(x.untyped_storage(), MARK):
            return False
        return not _is_weight(x)

    @hide_from_policies
    def _move(self, saved: _Saved, layer: _Layer) -> None:
        x = saved.tensor
        assert x is not None
        key = self._key(x)
        slot = self._slots.get(key)
        if slot is None or slot.version != x._version:
            slot = self._slots[key] = _Slot(x, self)
        saved.move_to(slot, layer)

    @hide_from_policies
    def _send(self, layer: _Layer, slots: Sequence[_Slot]) -> None:
        """Start the copies of slots to the host, or leave all on the device if the host has no memory for them."""
        slots = [slot for slot in slots if slot.host is None and slot.source is not None]
        for slot in slots:
            slot.check()
        slots = [slot for slot in slots if slot.written is None]
        if not slots:
            return
        need = sum(self.pool.rounded(slot.size) for slot in slots)
        if need > self.budget:
            raise ValueError(
                f"budget_gb is {self.budget / 1e9:.3g}, and layer {layer.name!r} alone saves {need / 1e9:.3g} GB for "
                "backward; give a larger budget_gb or smaller layers"
            )
        buffers = self.pool.take([slot.size for slot in slots])
        if not buffers:
            return
        with torch.no_grad():
            for slot, buffer in zip(slots, buffers, strict=True):
                slot.host = buffer
            for device in dict.fromkeys(slot.device for slot in slots):
                own = [slot for slot in slots if slot.device == device]
                pairs = [(slot.host[: slot.size], _bytes_of(slot.source)) for slot in own]  # type: ignore[index, arg-type]
                event = self.transfers.copy(pairs, device, self.transfers.record(device))
                self._in_flight.append((own, event, device))
        while len(self._in_flight) > IN_FLIGHT:
            self._release()

    def _release(self, keep: bool = False) -> None:
        """Wait for the oldest copy to the host, and free its sources unless backward has begun to read them."""
        slots, event, device = self._in_flight.popleft()
        self.transfers.wait(event, device)
        for slot in slots:
            slot.check()
            if not keep:
                slot.source = None

    # -- backward --

    @torch.compiler.disable(reason=COMPILE_INSIDE)
    def _unpack(self, saved: _Saved) -> Tensor:
        slot, layer = saved.slot, saved.layer
        if slot is None or layer is None:
            x = saved.tensor
            assert x is not None
            if x._version != saved.version:
                _raise_written(x.shape, x.dtype, x._version, saved.version)
            return x
        if self._in_flight:
            while self._in_flight:
                self._release(keep=True)
        slot.check()
        if slot.written is not None:
            _raise_written(saved.layout[2], saved.layout[0], slot.written, slot.version)
        if self._backward is None or self._backward() is not layer:
            self._backward = weakref.ref(layer)
            self._fetch(layer)
            if layer.previous is not None:
                self._fetch_of(layer.previous)
        if slot.source is not None:
            return saved.of(slot.source.untyped_storage(), slot.device)
        if slot.back is None:
            self._fetch(layer)
        self.transfers.wait(slot.arrival, slot.device)
        assert slot.back is not None
        x = saved.of(slot.back.untyped_storage(), slot.device)
        slot.reads += 1
        if slot.reads >= slot.saves:
            slot.back, slot.reads = None, 0
        return x

    def _fetch_of(self, layer: "weakref.ref[_Layer]", *_: Any) -> None:
        """Start the copy back of a layer if it still exists."""
        found = layer()
        if found is not None:
            self._fetch(found)

    def _fetch(self, layer: _Layer) -> None:
        """Start the copies of a layer's slots back to the device."""
        slots = [s for s in layer.live() if s.host is not None and s.source is None and s.back is None]
        with torch.no_grad():
            for device in dict.fromkeys(slot.device for slot in slots):
                own = [slot for slot in slots if slot.device == device]
                pairs = []
                for slot in own:
                    assert slot.host is not None
                    slot.back = self.transfers.allocate(slot.size, device)
                    pairs.append((slot.back, slot.host[: slot.size]))
                event = self.transfers.copy(pairs, device, self.transfers.record(device))
                for slot in own:
                    slot.arrival = event


def stay_on_device(*tensors: Tensor | None) -> None:
    """Mark tensors that `offload` never moves; the mark is of their storage."""
    for x in tensors:
        for part in () if x is None else x.tensors() if isinstance(x, QuantizedTensor) else (x,):
            setattr(part.untyped_storage(), MARK, True)


# ---- layers, weights and tensors ----


def _chosen(model: nn.Module, layers: str | Iterable[str | nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules of the chosen layers.

    Raises:
        ValueError: a pattern matches none, a module is not in the model, or there are no repeated layers.
    """
    names = {module: name for name, module in model.named_modules()}
    if layers is None:
        lists = [name for module, name in names.items() if isinstance(module, nn.ModuleList)]
        outer = [n for n in lists if not any(n.startswith(f"{other}.") or not other for other in lists if other != n)]
        found = [m for n in outer for m in model.get_submodule(n)]  # type: ignore[union-attr]
        if not found:
            raise ValueError(f"{type(model).__name__} has no nn.ModuleList of layers; pass layers=, names or modules")
        yield from ((names[module], module) for module in found)
        return
    for each in (layers,) if isinstance(layers, str) else layers:
        if isinstance(each, str):
            matches = [(n, m) for m, n in names.items() if fnmatchcase(n, each)]
            if not matches:
                raise ValueError(f"no layer is named {each!r}; {suggest(each, [n for n in names.values() if n])}")
            yield from matches
        elif each in names:
            yield names[each], each
        else:
            raise ValueError(f"a {type(each).__name__} of layers is not a module of the model; pass names or modules")


def _check_not_compiled(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a compiled module has chosen layers inside."""
    for name, module in model.named_modules():
        wraps, itself = hasattr(module, "_orig_mod"), getattr(module, "_compiled_call_impl", None) is not None
        if not (wraps or itself):
            continue
        prefix = f"{name}." if name else ""
        inside = next((n for n in layers if (n == name and itself) or (n != name and n.startswith(prefix))), None)
        if inside is not None:
            raise ValueError(f"{name or 'the model'} is compiled, with layer {inside!r} inside, but {COMPILE_INSIDE}")


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
    """Return True for a parameter, and for its views and casts."""
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
        return True
    node = x.grad_fn
    while node is not None and node.name() in OF_WEIGHTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)


def _weights(module: nn.Module) -> Iterator[int]:
    """Yield the storages of a module's parameters and buffers."""
    for x in (*module.parameters(), *module.buffers()):
        local = x.to_local() if hasattr(x, "to_local") else x
        for part in local.tensors() if isinstance(local, QuantizedTensor) else (local,):
            yield storage_id(part.untyped_storage())


def _bytes_of(x: Tensor) -> Tensor:
    """Return the storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
