"""State of stochastic rounding: the Philox stream of each operand of a layer, and how often it was used."""

import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.numerics.rounding import Noise, is_tracing
from quaver.torch.state import layer_state
from quaver.torch.state.layer_state import device_of, state_of


class _LayerNumbering(threading.local):
    def __init__(self) -> None:
        #: Next number within this thread's outermost autocast, None outside. Always set, because Dynamo guards on
        #: instance attributes.
        self.next: int | None = None


#: Numbers reserved for the matrices of a stack.
STACK = 1 << 16
#: Numbering of layers, started and ended by `autocast`.
layer_numbering = _LayerNumbering()


def assign_number(layer: nn.Module) -> None:
    """Number a layer at its first use, in the order of use within the outermost autocast; 0 outside of one.

    So a model that is built again draws the same noise. A layer with a number from an earlier autocast reserves it in
    this one, for example if the first forward of its model raised. A stack reserves `STACK` numbers, the first of them
    for its matrices.
    """
    if layer.__dict__.get("qualified_name") is not None:
        return
    state, following = state_of(layer), layer_numbering.next
    if state.serial is None:
        state.serial = following or 0
        count = layer._buffers.get("count")
        if count is not None:
            count[..., 2] = fresh_count(layer, count.device)[..., 2]
    if following is not None:
        # The full range, because a rank may have only some matrices of a stack.
        layer_numbering.next = max(following, state.serial + (STACK if state.members else 1))


def draw(layer: nn.Module, operand: str) -> Noise:
    """Return (seed, stream, count) for an operand's next quantization; call `advance_count` afterwards.

    For a layer with members, stream and count are tensors [members]; outside of torch.compile the stream is a list.
    """
    count = layer._buffers.get("count")
    if count is None:
        count = fresh_count(layer)
    seed: int = layer.__dict__.get("seed", 0)
    stream = streams(layer)[operand] if is_tracing() else tensor_id(layer, operand)
    number = count[..., int(operand.endswith(".T"))].clone()
    if not is_tracing() and operand.startswith("input"):
        number = layer_state.logged_or_replayed(layer, operand, number)
    return seed, stream, number


def advance_count(layer: nn.Module, operand: str, by: Tensor | int = 1, first: int = 0) -> None:
    """Advance the count of an operand, except while a forward is recomputed.

    Args:
        by: for a range of members, int64 or bool: 1 for each that has drawn.
        first: first member of the range.
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
    """Return the Philox stream of an operand: crc32 of "module.operand" if the layer has a name, else by
    `assign_number`.
    """
    return _numbers(layer)[operand]


def tensor_ids(layer: nn.Module, operand: str) -> tuple[int, int]:
    """Return `tensor_id` of an operand and of its transpose."""
    numbers = _numbers(layer)
    return numbers[operand], numbers[operand + ".T"]


def _numbers(layer: nn.Module) -> dict[str, Any]:
    streams(layer)
    numbers: dict[str, Any] = state_of(layer).streams[2]  # type: ignore[index]
    return numbers


def streams(layer: nn.Module) -> dict[str, Tensor]:
    """Return the streams of all operands as tensors, computed before torch.compile runs, which cannot trace crc32.

    Tensors, because numbers would be constants of the graph, and layers could not share a graph.
    """
    state = state_of(layer)
    cached = state.streams
    if cached is not None and is_tracing():
        return cached[1]
    assign_number(layer)
    name, serial = source = layer.__dict__.get("qualified_name"), state.serial
    if cached is None or cached[0] != source:
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
        cached = state.streams = source, tensors, numbers
    return cached[1]


def named_id(name: str, operand: str) -> int:
    """Return the stream of an operand of a named layer."""
    return zlib.crc32(f"{name}.{operand}".encode())


def members_ids(name: str | None, serial: int | None, members: Sequence[str], operand: str) -> list[int]:
    """Return the streams of members: those of layers named "name.member", or consecutive numbers without a name."""
    if name is None:
        assert serial is not None
        return [2 * (serial + int(member)) + operand.endswith(".T") for member in members]
    return [named_id(f"{name}.{member}".lstrip("."), operand) for member in members]


def name_streams(layer: nn.Module) -> None:
    """Compute the streams of a named layer; call this after naming or copying a layer.

    torch.compile may run the layer next, under any recipe, and cannot trace crc32.
    """
    if layer.__dict__.get("qualified_name") is not None:
        with torch.inference_mode(False):
            streams(layer)


def fresh_count(layer: nn.Module, device: Any = None) -> Tensor:
    """Return zero counts with the layer's number, or -1 if it has a name or no number yet; on the weight's device."""
    device = device_of(layer) if device is None else device
    state = state_of(layer)
    serial = None if layer.__dict__.get("qualified_name") is not None else state.serial
    if state.members:
        rows = [[0, 0, -1 if serial is None else serial + int(member)] for member in state.members]
        return torch.tensor(rows, dtype=torch.int64, device=device)
    return torch.tensor([0, 0, -1 if serial is None else serial], dtype=torch.int64, device=device)


def stream_of(count: Tensor) -> int:
    """Return the number of the first stream that belongs to a count, or -1."""
    return int(count.view(-1, 3)[0, 2])
