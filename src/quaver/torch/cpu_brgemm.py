"""float32 = bf16 @ bf16.T on CPUs whose vector units multiply bf16, block by block.

No operation of torch has this product on a CPU: a bf16 one rounds its result to bf16, and the hint that lets float32
ones multiply in bf16 inside has no effect on some processors that could (AMD Zen 4 with oneDNN 3.12; docs/lab.md). But
the block of which torch makes its own CPU attention does just this: `at::native::cpublas::brgemm`
(aten/src/ATen/native/CPUBlas.h), which libtorch exports. It is taken from there where its name, which spells out its
arguments, is found, where the processor has the instructions, and where a first product comes out right; otherwise
nothing of this file runs. It works on one thread, so it serves processes that have been given one.
"""

import ctypes
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: brgemm(m, n, k, lda, ldb, ldc, add to C, A, B in pairs of rows, C, B is in pairs), and what ends its use.
_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
#: Rows, columns and depth of a block.
ROWS, COLUMNS, DEPTH = 128, (64, 32), 512
#: Products of fewer rows, or of fewer m × n × k, are faster in plain float32: packing b costs as much as many rows.
FEWEST, SMALLEST = 128, 1 << 23


def takes(m: int, n: int, k: int) -> bool:
    """Whether a product [m, k] @ [n, k].T can run here."""
    fits = m >= FEWEST and m * n * k >= SMALLEST and n % COLUMNS[-1] == 0 and k % 2 == 0
    return fits and torch.get_num_threads() == 1 and _functions() is not None


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [n, k].T, both bf16 in any strides; float32 [m, n].

    Bounded: products exact, sums of at most 512 of them in float32, then added up in float32.
    """
    functions = _functions()
    assert functions is not None
    return _product(functions, a, b)


def _product(functions: tuple[Any, Any], a: Tensor, b: Tensor) -> Tensor:
    brgemm, release = functions
    (m, k), n = a.shape, b.shape[0]
    width = next(w for w in COLUMNS if n % w == 0)
    a = a.contiguous()
    # Panels of columns, two consecutive k beside each other: [panels, k / 2, width, 2].
    panels = b.unflatten(1, (k // 2, 2)).unflatten(0, (n // width, width)).permute(0, 2, 1, 3).contiguous()
    c = torch.empty((m, n))
    of_a, of_b, of_c = a.data_ptr(), panels.data_ptr(), c.data_ptr()
    for j in range(n // width):
        for i in range(0, m, ROWS):
            for at in range(0, k, DEPTH):
                brgemm(
                    min(ROWS, m - i),
                    width,
                    min(DEPTH, k - at),
                    k,
                    width,
                    n,
                    at > 0,
                    of_a + 2 * (i * k + at),
                    of_b + 2 * width * (j * k + at),
                    of_c + 4 * (i * n + j * width),
                    True,
                )
    release(True)
    return c


@cache
def _functions() -> tuple[Any, Any] | None:
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return None
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        library = ctypes.CDLL(path)
        brgemm, release = library[_NAME], library[_RELEASE]
    except (OSError, AttributeError):
        return None
    size, yes, pointer = ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p
    brgemm.argtypes, brgemm.restype = [*[size] * 6, yes, pointer, pointer, pointer, yes], None
    release.argtypes, release.restype = [yes], None
    found = brgemm, release
    return found if _is_right(found) else None


def _is_right(functions: tuple[Any, Any]) -> bool:
    """A product that only the right blocks, order and sums get right."""
    a = (torch.arange(3 * 8) % 11 - 5.0).view(3, 8)
    b = (torch.arange(64 * 8) % 7 - 3.0).view(64, 8)
    return torch.equal(_product(functions, a.bfloat16(), b.bfloat16()), a @ b.t())
