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
from quaver.torch.backends.gpu.launching.launch import Run, interpreted
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
        "INTEGERS": architecture(device) == 89,
    }


def in_words(codes: Tensor | None) -> Tensor | None:
    """A buffer of codes four to an int32."""
    return None if codes is None else codes.view(torch.int32)


def taking_words(run: Run, kernel: Any, which: int) -> Run:
    """A launch as a function of tensors of which one, a buffer of codes, is written as int32.

    A compiled kernel has that from its signature and takes the address; an interpreted one looks at the tensor.
    """
    if not interpreted(kernel):
        return run
    return lambda *tensors: run(*tensors[:which], in_words(tensors[which]), *tensors[which + 1 :])


def of(codes: Tensor, k: int) -> Tensor:
    """The k columns of a buffer that are codes."""
    return codes if codes.shape[1] == k else codes[:, :k]
