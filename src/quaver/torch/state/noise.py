"""Stochastic rounding's state in a layer: which Philox stream an operand draws from, and how often it has drawn."""

import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.numerics.rounding import Noise, is_tracing
from quaver.torch.state import layer_state
from quaver.torch.state.layer_state import device_of, state_of


class _Order(threading.local):
    def __init__(self) -> None:
        #: The next number within this thread's outermost autocast, None outside of one. Dynamo guards on whether an
        #: instance has it, so that it has it from the start.
        self.next: int | None = None


#: Numbers for the matrices of a stack.
STACK = 1 << 16
#: `autocast` begins and ends it.
order = _Order()


def assign_number(layer: nn.Module) -> None:
    """Number a layer at its first use: in the order of use within the outermost autocast, 0 outside of one.

    So a model that is built again draws the same noise. A stack takes `STACK` numbers, the first
    of them for its matrices.
    """
    state = state_of(layer)
    if state.serial is not None or layer.__dict__.get("qualified_name") is not None:
        return
    if order.next is None:
        state.serial = 0
    else:
        state.serial = order.next
        # A rank may have some of a stack's matrices only.
        order.next += STACK if state.members else 1
    count = layer._buffers.get("count")
    if count is not None:
        count[..., 2] = fresh_count(layer, count.device)[..., 2]


def draw(layer: nn.Module, operand: str) -> Noise:
    """(seed, stream, count) of an operand's next quantization; tell `drawn` when it is done.

    Of a layer with members stream and count are tensors [members], and outside of a compiler the stream a list.
    """
    count = layer._buffers.get("count")
    if count is None:
        count = fresh_count(layer)
    seed: int = layer.__dict__.get("seed", 0)
    stream = streams(layer)[operand] if is_tracing() else tensor_id(layer, operand)
    number = count[..., int(operand.endswith(".T"))].clone()
    if not is_tracing() and operand.startswith("input"):
        number = layer_state.recorded_amax(layer, operand, number)
    return seed, stream, number


def drawn(layer: nn.Module, operand: str, by: Tensor | int = 1, first: int = 0) -> None:
    """The count of an operand moves on; not where a forward runs again.

    Args:
        by: of some members, int64 or bool: 1 for each that has drawn.
        first: the first of these.
    """
    count = layer._buffers.get("count")
    if count is None or layer_state.replaying():
        return
    column = int(operand.endswith(".T"))
    if isinstance(by, Tensor):
        count[first : first + by.shape[0], column] += by
    else:
        count[..., column] += by


def tensor_id(layer: nn.Module, operand: str) -> int:
    """Which Philox stream: the crc32 of "module.operand" where convert knows the name, else by `assign_number`."""
    return _numbers(layer)[operand]


def tensor_ids(layer: nn.Module, operand: str) -> tuple[int, int]:
    """`tensor_id` of an operand and of its transpose."""
    numbers = _numbers(layer)
    return numbers[operand], numbers[operand + ".T"]


def _numbers(layer: nn.Module) -> dict[str, Any]:
    streams(layer)
    numbers: dict[str, Any] = state_of(layer).streams[2]  # type: ignore[index]
    return numbers


def streams(layer: nn.Module) -> dict[str, Tensor]:
    """`tensor_id` of every operand, found before a compiler looks: it cannot trace a checksum.

    They are tensors because a number would be a constant of the graph, and layers could not share one.
    """
    state = state_of(layer)
    kept = state.streams
    if kept is not None and is_tracing():
        return kept[1]
    assign_number(layer)
    name, serial = source = layer.__dict__.get("qualified_name"), state.serial
    if kept is None or kept[0] != source:
        operands = [o + t for o in ("input", "weight", "grad_output") for t in ("", ".T")]
        numbers: dict[str, Any]
        if state.members:
            numbers = {o: [*members_ids(name, serial, state.members, o)] for o in operands}
        elif name is None:
            assert serial is not None
            numbers = {operand: 2 * serial + operand.endswith(".T") for operand in operands}
        else:
            numbers = {operand: named_id(name, operand) for operand in operands}
        tensors = {o: torch.tensor(number, dtype=torch.int64, device="cpu") for o, number in numbers.items()}
        kept = state.streams = source, tensors, numbers
    return kept[1]


def named_id(name: str, operand: str) -> int:
    """The stream of an operand of a layer that has a name."""
    return zlib.crc32(f"{name}.{operand}".encode())


def members_ids(name: str | None, serial: int | None, members: Sequence[str], operand: str) -> list[int]:
    """The streams of members: those of layers of their names inside of this one, or numbered one after the other."""
    if name is None:
        assert serial is not None
        return [2 * (serial + int(member)) + operand.endswith(".T") for member in members]
    return [named_id(f"{name}.{member}".lstrip("."), operand) for member in members]


def name_streams(layer: nn.Module) -> None:
    """Make the streams of a layer that has a name: every function that names or copies a layer calls this.

    A compiler may be the next to run it, whatever recipe it gets, and cannot trace a checksum.
    """
    if layer.__dict__.get("qualified_name") is not None:
        with torch.inference_mode(False):
            streams(layer)


def fresh_count(layer: nn.Module, device: Any = None) -> Tensor:
    """Counts of 0 with the layer's number, or -1 if it has a name or no number yet. On the weight's device."""
    device = device_of(layer) if device is None else device
    state = state_of(layer)
    serial = None if layer.__dict__.get("qualified_name") is not None else state.serial
    if state.members:
        rows = [[0, 0, -1 if serial is None else serial + int(member)] for member in state.members]
        return torch.tensor(rows, dtype=torch.int64, device=device)
    return torch.tensor([0, 0, -1 if serial is None else serial], dtype=torch.int64, device=device)


def stream_of(count: Tensor) -> int:
    """The number of the first stream that goes with a count, or -1."""
    return int(count.view(-1, 3)[0, 2])
