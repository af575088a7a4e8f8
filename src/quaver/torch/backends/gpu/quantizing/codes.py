"""Room for eight-bit codes, and what a kernel must know to write them.

Rows are padded by zeros to a multiple of 16 bytes, which is what the GEMMs ask of k, so that no number of tokens is
special: a kernel fills the padding too.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.backends.gpu.launching.device import architecture
from quaver.torch.backends.gpu.launching.rooms import Room, in_words, row_major
from quaver.torch.numerics.quantized import FLOAT8

#: What Triton calls the formats.
DTYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}

#: Programs along the second axis of a grid; along the first there may be 2**31 - 1.
SECOND_AXIS = 65535


def grid(down: int, across: int) -> tuple[tuple[int, int], bool]:
    """Programs over a matrix of so many blocks, neighbours in a row beside each other; whether the rows come first."""
    tall = down > SECOND_AXIS
    return ((down, across) if tall else (across, down)), tall


def empty_codes(rows: int, k: int, spec: QuantSpec, device: torch.device) -> Tensor:
    """Room for eight-bit codes [rows, k], rows rounded up to 16 bytes: the whole buffer, which a kernel fills."""
    return torch.empty((rows, padded(k)), dtype=FLOAT8[spec.format.name], device=device)


def room_for_codes(rows: int, k: int, spec: QuantSpec, fresh: bool = False) -> Room:
    """The same, before there is any."""
    return row_major((rows, padded(k)), FLOAT8[spec.format.name], fresh=fresh)


def codes_in_words(rows: int, k: int, spec: QuantSpec, turned: bool = False, fresh: bool = False) -> Room:
    """The same, of codes that a kernel writes four to an int32; `turned` gives the transpose of what lies so."""
    return in_words(row_major((rows, padded(k)), FLOAT8[spec.format.name], turned, fresh))


def padded(k: int) -> int:
    """Codes of a row of k, with those that fill it up."""
    return -(-k // 16) * 16


def format_constants(spec: QuantSpec, device: torch.device) -> dict[str, Any]:
    """What a kernel knows of a format and of how its scales are found."""
    fmt = spec.format
    return {
        "POWER_OF_TWO": spec.power_of_two,
        "EMAX": fmt.emax,
        "TOP_MANTISSA": fmt.max_mantissa,
        "MAX": float(fmt.max),
        "INTEGERS": integers(device),
    }


def integers(device: torch.device) -> int:
    """How kernels find codes, as `quaver.kernels.bits.numbers.encode` has it: by a cast, or on the bits."""
    arch = architecture(device)
    return 0 if arch > 89 else 1 if arch == 89 else 2


def of(codes: Tensor, k: int) -> Tensor:
    """The k columns of a buffer that are codes."""
    return codes if codes.shape[1] == k else codes[:, :k]
