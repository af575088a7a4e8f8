"""Copies between a GPU and pinned host memory on side streams, and a pool of pinned buffers."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Transfers:
    """Streams, copies and memory of CUDA devices; tests replace it by a simulation on a CPU.

    Args:
        stream: side stream for the copies of its device. Other devices get a new one.
    """

    #: Type of the devices whose tensors are moved.
    device_type = "cuda"

    def __init__(self, stream: "torch.cuda.Stream | None" = None) -> None:
        self.side = {} if stream is None else {stream.device: stream}

    def allocate_host(self, size: int) -> Tensor:
        """Return `size` bytes of pinned memory; RuntimeError if the host cannot pin as many."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Return `size` bytes of device memory, allocated on the compute stream."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def record(self, device: torch.device) -> Any:
        """Record an event on the compute stream and return it."""
        return torch.cuda.current_stream(device).record_event()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, after: Any) -> Any:
        """Copy each (target, source) on the side stream after the event `after`; return an event at their end."""
        if device not in self.side:
            self.side[device] = torch.cuda.Stream(device)
        side = self.side[device]
        side.wait_event(after)
        with torch.cuda.stream(side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return side.record_event()

    def wait(self, event: Any, device: torch.device) -> None:
        """Make the compute stream wait for an event."""
        torch.cuda.current_stream(device).wait_event(event)

    def synchronize(self, event: Any, device: torch.device) -> None:
        """Make the calling CPU thread wait for an event."""
        event.synchronize()

    def pin(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor in pinned memory, or the tensor with a warning if the host cannot pin it."""
        try:
            return x.pin_memory()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            warnings.warn(
                f"the host cannot pin {x.nbytes / 1e9:.3g} GB ({first_line}), so copies of it wait for each other; "
                "allow more locked memory",
                stacklevel=2,
            )
            return x


class HostPool:
    """Pool of pinned buffers, up to a budget in bytes. Sizes are powers of two, as in torch's own pinned allocator.

    A returned buffer is reused at once, even while a copy still reads it: all copies of a device run in order on one
    stream. torch's allocator would wait for an event, and pin more memory while the host is ahead of the device.
    """

    def __init__(self, transfers: Any, budget: float) -> None:
        self.transfers, self.budget = transfers, budget
        self.allocated = 0
        self.warned = False
        #: Unused buffers by device and size.
        self.free: dict[tuple[torch.device, int], list[Tensor]] = {}

    @staticmethod
    def rounded(size: int) -> int:
        """Return the size of the buffer that `take` returns for `size` bytes."""
        return 1 << (size - 1).bit_length()

    def take(self, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return a buffer of at least that many bytes for each size; an empty list if there is no memory for all."""
        wanted = Counter((device, self.rounded(size)) for size in sizes)
        missing = [key[1] for key, count in wanted.items() for _ in range(count - len(self.free.get(key, ())))]
        if self.allocated + sum(missing) > self.budget:
            # Free unused buffers of other sizes, such as those of another sequence length.
            for key, buffers in self.free.items():
                while len(buffers) > wanted[key]:
                    self.allocated -= buffers.pop().numel()
        if self.allocated + sum(missing) > self.budget:
            return []
        for size in missing:
            try:
                self.give(self.transfers.allocate_host(size), device)
            except (RuntimeError, MemoryError) as error:
                self._warn_once(error)
                return []
            self.allocated += size
        return [self.free[device, self.rounded(size)].pop() for size in sizes]

    def give(self, buffer: Tensor, device: torch.device) -> None:
        """Return a buffer to the pool."""
        self.free.setdefault((device, buffer.numel()), []).append(buffer)

    def _warn_once(self, error: BaseException) -> None:
        if not self.warned:
            first_line = str(error).partition("\n")[0]
            warnings.warn(
                f"no more pinned memory than {self.allocated / 1e9:.3g} GB ({first_line}): quaver.torch.offload leaves "
                "other layers on the device; pass a smaller budget_gb, or allow more locked memory",
                stacklevel=2,
            )
        self.warned = True
