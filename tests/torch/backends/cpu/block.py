"""libtorch's block where the processor has it, else one that does to memory what libtorch's does, by torch."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from quaver.torch.backends.cpu import gemm

Functions = tuple[Callable[..., None], Callable[[bool], None]]


def functions() -> Functions:
    """The functions that multiply a block and end its use: real or emulated."""
    return gemm._functions() or (multiply, lambda in_pairs: None)


def multiply(
    m: int, n: int, k: int, lda: int, ldb: int, ldc: int, add: bool, a: int, b: int, c: int, in_pairs: bool
) -> None:
    """C [m, n] = (C +) A [m, k] @ B with rows in pairs: [k / 2, n, 2]."""
    assert in_pairs and k % 2 == 0
    left = _memory(a, torch.bfloat16, (m, k), (lda, 1))
    right = _memory(b, torch.bfloat16, (k // 2, 2, n), (2 * ldb, 1, 2)).reshape(k, n)
    out = _memory(c, torch.float32, (m, n), (ldc, 1))
    y = left.float() @ right.float()
    out.copy_(out + y if add else y)


def _memory(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
