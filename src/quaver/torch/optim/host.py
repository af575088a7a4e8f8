"""Optimizer states in host memory, where the CPU steps them, or from where they are copied to the device.

    offload     weights, gradients   moments, masters     a step
    None        device               device               on the device
    "cpu"       device               host memory          copies gradients and weights to the host, steps there, and
                                                          copies the weights back
    "stream"    device               pinned host memory   copies states to the device, steps there, and copies them back

Parameters are stepped in pieces, lists of whole parameters. While one piece is stepped, a side stream copies the next
one into the other of two buffers. Parameters below `SMALL` elements, as most norms and biases are, have their states on
the device.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from quaver.reference.optimizer_state import SMALL
from quaver.torch.backends.gpu import capture
from quaver.torch.backends.gpu.host_memory import Transfers
from quaver.torch.optim import layout
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.step import ParameterTensors

OFFLOAD = (None, "cpu", "stream")
#: Bytes of states in a piece, by `offload`. A piece contains at least one parameter.
PIECE_BYTES = {"cpu": 1 << 26, "stream": 1 << 28}
#: Alignment of tensors in a buffer.
ALIGNMENT = 256
#: Weak reference to the `HostStates` that have a parameter's states, to find a second optimizer of it.
_claimed = WeakIdKeyDictionary()


class HostStates:
    """Placement of an optimizer's states, and copies between host and device around its step.

    Args:
        offload: "cpu" or "stream".
        transfers: streams, copies and memory of the device.
    """

    def __init__(self, offload: str, transfers: Any = None) -> None:
        self.offload = offload
        self.transfers = transfers or Transfers()
        self.piece_bytes = PIECE_BYTES[offload]
        #: Two buffers for each device: with offload="cpu" pinned host memory of all steps, else device memory of one.
        self._buffers: dict[tuple[torch.device, int], Tensor] = {}
        #: Event at the end of each device's last copy, which `finish` waits for.
        self._last: dict[torch.device, Any] = {}

    def offloads(self, p: Tensor) -> bool:
        """True if the states of a parameter are in host memory."""
        return p.numel() >= SMALL and layout.local(p).device.type == self.transfers.device_type

    def check(self, p: Tensor) -> None:
        """Raise a ValueError for a parameter that another tool has moved to host memory."""
        on_host = isinstance(p, DTensor) and p.device_mesh.device_type != "cpu" and layout.local(p).is_cpu
        if on_host or (layout.local(p).is_cpu and layout.local(p).is_pinned()):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is already in host memory, where another tool put it (such as "
                f"CPUOffloadPolicy of fully_shard, or CPUOffloadOptimizer of torchao): leave offload="
                f"{self.offload!r} out, or leave out the other tool"
            )

    def check_capture(self, parameters: Sequence[Tensor]) -> None:
        """Raise a RuntimeError in a CUDA graph, which cannot wait for the host."""
        for device in dict.fromkeys(layout.local(p).device for p in parameters):
            if device.type == "cuda" and capture.is_captured_or_rehearsed(device):
                raise RuntimeError(
                    f"an optimizer with offload={self.offload!r} steps inside a CUDA graph (torch.cuda.graph, "
                    "quaver.torch.CapturedStep), where it cannot copy: leave one of the two out"
                )

    def claim(self, parameters: Sequence[Tensor], need: int) -> str:
        """Return why states of these parameters cannot be created in host memory, or "".

        Args:
            parameters: those without states.
            need: bytes of their states.
        """
        if self._offloaded_by_others(parameters):
            # An optimizer in a reference cycle, as those with a learning rate scheduler are, is freed by the collector.
            gc.collect()
        if self._offloaded_by_others(parameters):
            return (
                "another optimizer already stores states of the same parameters in host memory: delete it, or create "
                "one of the two without offload"
            )
        free = available_memory()
        if need > free:
            return (
                f"the optimizer states need {need / 1e9:.3g} GB of host memory, and {free / 1e9:.3g} GB are available: "
                "use a preset with smaller states, such as 'lean', shard parameters over more ranks, or leave offload "
                "out"
            )
        for p in parameters:
            _claimed[p] = weakref.ref(self)
        return ""

    def _offloaded_by_others(self, parameters: Sequence[Tensor]) -> bool:
        found = [_claimed.get(p) for p in parameters]
        return any(each is not None and each() not in (None, self) for each in found)

    def pinned(self, p: Tensor, state: Tensor) -> Tensor:
        """Return a parameter's state in pinned memory if copies to the device need it."""
        if self.offload != "stream" or not layout.local(state).is_cpu or state.dim() == 0:
            return state
        return layout.like(p, self.transfers.pin(layout.local(state)), state.shape)

    # ---- steps ----

    def pieces(self, parameters: Sequence[Tensor], bytes_of: Callable[[Tensor], int]) -> Iterator[list[Tensor]]:
        """Split parameters into pieces of one device, the same on all ranks.

        Args:
            parameters: those whose states are in host memory.
            bytes_of: returns the bytes of a parameter's states, equal on all ranks.
        """
        for device in dict.fromkeys(layout.local(p).device for p in parameters):
            piece, size = list[Tensor](), 0
            for p in parameters:
                if layout.local(p).device != device:
                    continue
                if piece and size + bytes_of(p) > self.piece_bytes:
                    yield piece
                    piece, size = [], 0
                piece.append(p)
                size += bytes_of(p)
            if piece:
                yield piece

    def run(
        self,
        pieces: Sequence[Sequence[Tensor]],
        parts_of: Callable[[Tensor], tuple[ParameterTensors, WeightFormat]],
        step: Callable[[Mapping[Tensor, ParameterTensors]], None],
    ) -> None:
        """Step pieces, each while the next one is copied.

        Args:
            pieces: parameters of each piece.
            parts_of: returns the tensors of a parameter and the format of its weight.
            step: steps parameters, given tensors that are all on one device.
        Raises:
            ValueError: the host cannot pin the buffers; no parameter was stepped.
        """
        to_host = self.offload == "cpu"
        staged = [{p: Staged(*parts_of(p), to_host=to_host) for p in piece} for piece in pieces]
        devices = [layout.local(piece[0]).device for piece in pieces]
        for index, piece in enumerate(staged):
            self._reserve(devices[index], index % 2, sum(each.bytes for each in piece.values()))
        try:
            coming = self._fetch(staged[0], devices[0], 0) if staged else None
            for index, piece in enumerate(staged):
                event, coming = coming, None
                if index + 1 < len(staged):
                    coming = self._fetch(staged[index + 1], devices[index + 1], (index + 1) % 2)
                # The CPU waits itself; a device's compute stream waits without the CPU.
                (self.transfers.synchronize if to_host else self.transfers.wait)(event, devices[index])
                step({p: each.here for p, each in piece.items()})
                self._send_back(piece, devices[index])
        finally:
            # Also after an error: the caller may go on with weights and buffers.
            for device, event in self._last.items():
                self.transfers.wait(event, device)
            if not to_host:
                self._buffers = {}

    def _reserve(self, device: torch.device, slot: int, size: int) -> None:
        """Allocate one of the two buffers of a device if it has fewer than `size` bytes. Raises: ValueError."""
        found = self._buffers.get((device, slot))
        if found is not None and found.numel() >= size:
            return
        if self.offload == "stream":
            self._buffers[device, slot] = self.transfers.allocate(size, device)
            return
        # torch reuses the pinned memory of a smaller buffer only after copies from it are done.
        self._buffers.pop((device, slot), None)
        try:
            self._buffers[device, slot] = self.transfers.allocate_host(size)
        except (RuntimeError, MemoryError) as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"the host has no {size / 1e9:.3g} GB of pinned memory for copies of gradients and weights "
                f"({first_line}): allow more locked memory, or leave offload out"
            ) from error

    def _fetch(self, piece: Mapping[Tensor, "Staged"], device: torch.device, slot: int) -> Any:
        """Start copies of a piece into a buffer; return the event at their end."""
        pairs, at = list[tuple[Tensor, Tensor]](), 0
        for each in piece.values():
            pairs += each.carve(self._buffers[device, slot][at : at + each.bytes])
            at += each.bytes
        event = self._last[device] = self.transfers.copy(pairs, device, self.transfers.record(device))
        return event

    def _send_back(self, piece: Mapping[Tensor, "Staged"], device: torch.device) -> None:
        """Start copies of written tensors to where they came from."""
        pairs = [pair for staged in piece.values() for pair in staged.back]
        self._last[device] = self.transfers.copy(pairs, device, self.transfers.record(device))
        for p in piece:
            # Caches that compare version counters must notice these writes.
            written = [target for target, _ in piece[p].back if not target.is_inference()]
            torch.autograd.graph.increment_version([p, *written])

    def finish(self) -> None:
        """Wait until all states are in host memory."""
        for device, event in self._last.items():
            self.transfers.synchronize(event, device)
        self._last = {}


class Staged:
    """Tensors of one parameter's step, those of the other memory replaced by copies.

    Args:
        parts: tensors as matrices, in both memories.
        weight_format: format of the weight.
        to_host: copy weight and gradient to the host; else copy states to the device.
    """

    def __init__(self, parts: ParameterTensors, weight_format: WeightFormat, to_host: bool) -> None:
        # Number of tensors of the weight that layers read, which are on the device: itself, and scales of its codes.
        stored = 1 + (weight_format.code_spec is not None)
        self.parts, self.stored, self.to_host = parts, stored, to_host
        states = (*parts.weight[stored:], *(t for moment_tensors in parts.moments for t in moment_tensors))
        #: Tensors that are copied back after the step.
        self.written: tuple[Tensor, ...] = parts.weight[:stored] if to_host else states
        #: Tensors that are copied before the step; begins with `written`.
        self.copied = (*self.written, *parts.gradient) if to_host else states
        #: Bytes of the buffer.
        self.bytes = sum(_aligned(t) for t in self.copied)
        #: Pairs (target, source) of copies after the step.
        self.back: list[tuple[Tensor, Tensor]] = []
        #: Tensors for the step, after `carve` all in one memory.
        self.here = parts

    def carve(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Divide a buffer into copies of the tensors; return the pairs (target, source)."""
        copies, at = list[Tensor](), 0
        for t in self.copied:
            copies.append(buffer[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape))
            at += _aligned(t)
        pairs = list(zip(copies, self.copied, strict=True))
        self.back = [(source, copy) for copy, source in pairs[: len(self.written)]]
        remaining = iter(copies)
        weight, moments, gradient = self.parts
        if self.to_host:
            weight = (*(next(remaining) for _ in range(self.stored)), *weight[self.stored :])
            gradient = tuple(remaining)
        else:
            weight = (*weight[: self.stored], *(next(remaining) for _ in weight[self.stored :]))
            moments = tuple(tuple(next(remaining) for _ in moment_tensors) for moment_tensors in moments)
        self.here = ParameterTensors(weight, moments, gradient)
        return pairs


def _aligned(t: Tensor) -> int:
    return -(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT


def available_memory() -> int:
    """Return the bytes of host memory that this process can still allocate: of the machine and of its container."""
    limits = [1 << 62]
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * int(line.split()[1]))
    # Control groups, version 2. File caches that the kernel would free count as used there.
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        used = int((group / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        limits.append(
            int((group / "memory.max").read_text(encoding="ascii")) - used + int(statistics.get("inactive_file", 0))
        )
    return max(0, min(limits))
