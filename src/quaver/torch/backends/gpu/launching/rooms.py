"""Room for what a launch writes, described before there is any: shape, strides and dtype, and how a kernel is told."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Codes of four bits, as a GEMM takes them: two a byte.
FOURS = torch.float4_e2m1fn_x2


class Room(NamedTuple):
    """What a launch writes, as it is read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    #: As a kernel is told of it: one that is interpreted looks at more than an address.
    told: Callable[[Tensor], Tensor] = torch.Tensor.detach
    #: In a `Way`, whether each call makes a new one; else a thread writes to one place on a stream, again and again.
    fresh: bool = False
    #: Whether launches take it for zeros; a place that is written to again they leave so.
    zeros: bool = False


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> Room:
    """Room for a tensor whose rows lie one after the other."""
    return Room(shape, torch.empty(shape, dtype=dtype, device="meta").stride(), dtype)


def row_major(shape: tuple[int, int], dtype: torch.dtype, turned: bool = False, fresh: bool = False) -> Room:
    """Room for a matrix whose rows lie one after the other; `turned` gives its transpose, lying so."""
    if turned:
        return Room(shape[::-1], (1, shape[1]), dtype, torch.Tensor.t, fresh)
    return Room(shape, (shape[1], 1), dtype, fresh=fresh)


def in_words(room: Room) -> Room:
    """The same room, of codes that a kernel writes four to an int32."""
    return room._replace(told=_words)


def _words(codes: Tensor) -> Tensor:
    """Codes that lie row by row, or their transpose, as they lie: four to an int32."""
    return (codes if codes.is_contiguous() else codes.t()).view(torch.int32)


def empty(room: Room, device: torch.device) -> Tensor:
    if room.zeros:
        return torch.zeros(room.shape, dtype=room.dtype, device=device)
    if room.dtype is FOURS:
        # Of which torch fills none, as it does where algorithms are to be deterministic.
        return torch.empty_strided(room.shape, room.strides, dtype=torch.uint8, device=device).view(FOURS)
    return torch.empty_strided(room.shape, room.strides, dtype=room.dtype, device=device)


def pattern(room: Room, device: torch.device) -> Tensor:
    """What `torch.empty_like` makes such rooms of, in two thirds of the time that their shape and dtype take: a tensor
    without memory."""
    with torch.inference_mode(False):
        tensor = empty(room, device)
    tensor.untyped_storage().resize_(0)
    return tensor


def told_of(room: Room, device: torch.device) -> Tensor:
    """What a kernel is told of a room, without memory: to compile its launch by."""
    told = room.told(empty(room, device))
    told.untyped_storage().resize_(0)
    return told
