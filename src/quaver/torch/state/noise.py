"""Stochastic rounding's state in a layer: which Philox stream an operand draws from, and how often it has drawn."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.numerics.philox import Noise
from quaver.torch.state import recomputation
from quaver.torch.state.layer import device_of, state_of


def draw(layer: nn.Module, operand: str) -> Noise:
    """(seed, stream, count) of an operand's next quantization; tell `drawn` when it is done."""
    count = layer._buffers.get("count")
    if count is None:
        count = fresh_count(layer)
    seed: int = layer.__dict__.get("seed", 0)
    stream = streams(layer)[operand] if torch.compiler.is_compiling() else tensor_id(layer, operand)
    number = count[int(operand.endswith(".T"))].clone()
    if not torch.compiler.is_compiling() and operand.startswith("input"):
        number = recomputation.noted(layer, operand, number)
    return seed, stream, number


def drawn(layer: nn.Module, operand: str) -> None:
    """The count of an operand moves on; not where a forward runs again."""
    count = layer._buffers.get("count")
    if count is not None and not recomputation.replaying():
        count[int(operand.endswith(".T"))] += 1


def tensor_id(layer: nn.Module, operand: str) -> int:
    """Which Philox stream: the crc32 of "module.operand" where convert knows the name, else by order of making."""
    return _numbers(layer)[operand]


def tensor_ids(layer: nn.Module, operand: str) -> tuple[int, int]:
    """`tensor_id` of an operand and of its transpose."""
    numbers = _numbers(layer)
    return numbers[operand], numbers[operand + ".T"]


def _numbers(layer: nn.Module) -> dict[str, int]:
    streams(layer)
    numbers: dict[str, int] = state_of(layer).streams[2]  # type: ignore[index]
    return numbers


def streams(layer: nn.Module) -> dict[str, Tensor]:
    """`tensor_id` of every operand, found before a compiler looks: it cannot trace a checksum.

    They are tensors because a number would be a constant of the graph, and layers could not share one.
    """
    state = state_of(layer)
    kept = state.streams
    if kept is not None and torch.compiler.is_compiling():
        return kept[1]
    name, serial = source = layer.__dict__.get("qualified_name"), state.serial
    if kept is None or kept[0] != source:
        operands = [o + t for o in ("input", "weight", "grad_output") for t in ("", ".T")]
        if name is None:
            numbers = {operand: 2 * serial + operand.endswith(".T") for operand in operands}
        else:
            numbers = {operand: zlib.crc32(f"{name}.{operand}".encode()) for operand in operands}
        tensors = {o: torch.tensor(number, dtype=torch.int64, device="cpu") for o, number in numbers.items()}
        kept = state.streams = source, tensors, numbers
    return kept[1]


def name_streams(layer: nn.Module) -> None:
    """Make the streams of a layer that has a name: every function that names or copies a layer calls this.

    A compiler may be the next to run it, whatever recipe it gets, and cannot trace a checksum.
    """
    if layer.__dict__.get("qualified_name") is not None:
        with torch.inference_mode(False):
            streams(layer)


def fresh_count(layer: nn.Module, device: Any = None) -> Tensor:
    """Nothing quantized yet; the stream's number goes with it, or -1 where a name tells. On the weight's device."""
    device = device_of(layer) if device is None else device
    named = layer.__dict__.get("qualified_name") is not None
    stream = -1 if named else state_of(layer).serial
    return torch.tensor([0, 0, stream], dtype=torch.int64, device=device)
