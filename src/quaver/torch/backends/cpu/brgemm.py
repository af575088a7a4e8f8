"""float32 = bf16 @ bf16.T on CPUs whose vector units multiply bf16, block by block.

No operation of torch has this product on a CPU: a bf16 one rounds its result to bf16, and the setting that lets float32
ones multiply in bf16 inside belongs to the process. But the block of which torch makes its own CPU attention does just
this: `at::native::cpublas::brgemm` (aten/src/ATen/native/CPUBlas.h), which libtorch exports. It is taken from there
where its name, which spells out its arguments, is found, where the processor has the instructions, and where a first
product comes out right; otherwise nothing of this file runs. A block works on one thread; torch's threads share a
product's blocks, and the bits are those of one thread.

libtorch compiles a block for each combination of sizes and strides and keeps it for the life of the thread, tens of
kilobytes each. So what depends on the number of tokens is cut and packed to a few sizes.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.torch.backends.cpu import scratch, team

#: brgemm(m, n, k, lda, ldb, ldc, add to C, A, B in pairs of rows, C, B is in pairs), and what ends its use.
_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
#: Rows, columns and depth of a block. Where threads share, more rows: each block ends with asking for Python's lock.
ROWS, SHARED_ROWS, COLUMNS, DEPTH = 128, 256, (64, 32), 512
#: k is padded with zeros to a multiple of this.
STEP = 32
#: Products of fewer rows, or of fewer m × n × k, are faster in plain float32: packing b costs as much as many rows.
FEWEST, SMALLEST = 128, 1 << 23


def takes(m: int, n: int, k: int) -> bool:
    """True if a product [m, k] @ [n, k].T can run here."""
    return m >= FEWEST and m * n * k >= SMALLEST and n % COLUMNS[-1] == 0 and _functions() is not None


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [n, k].T, both bf16 in any strides, n a multiple of 32; float32 [m, n].

    Args:
        out: where it is written if this is contiguous.
    Bounded: products exact, sums of at most 512 of them in float32, then added up in float32.
    """
    functions = _functions()
    assert functions is not None
    # So many products are worth waking a thread.
    threads = min(torch.get_num_threads(), a.numel() * b.shape[0] // SMALLEST)
    return _product(functions, a, b, max(0, threads - 1), out)


def available() -> bool:
    """True where this file can multiply; a compiler that traces takes it for a constant."""
    return _functions() is not None


#: What `torch.compiler.assume_constant_result` sets, which would import the compiler.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def multiply_each(a: Tensor, pairs: Tensor, out: Tensor) -> None:
    """Write a [N, m, k] times matrices [k, n], all contiguous, to float32 out [N, m, n], in this thread.

    libtorch compiles a block for each m, n, k and width of the pairs.

    Args:
        pairs: bf16 [N, at least k / 2, at least n, 2]: two consecutive rows of each matrix beside each other.
    Bounded: products exact, added up in float32.
    """
    functions = _functions()
    assert functions is not None
    brgemm, release = functions
    (count, m, k), n = a.shape, out.shape[2]
    depth, columns = pairs.shape[1:3]
    assert out.shape == (count, m, n) and pairs.shape == (count, depth, columns, 2) and k <= 2 * depth and n <= columns

    of_a, of_b = address(a, torch.bfloat16, a.numel()), address(pairs, torch.bfloat16, pairs.numel())
    of_c = address(out, torch.float32, out.numel())
    try:
        for i in range(count):
            at_a, at_b, at_c = of_a + 2 * i * m * k, of_b + 4 * i * depth * columns, of_c + 4 * i * m * n
            brgemm(m, n, k, k, columns, n, False, at_a, at_b, at_c, True)
    finally:
        # What it holds is the thread's.
        release(True)


def _product(functions: tuple[Any, Any], a: Tensor, b: Tensor, helpers: int, out: Tensor | None = None) -> Tensor:
    brgemm, release = functions
    (m, k), n = a.shape, b.shape[0]
    width, padded = next(w for w in COLUMNS if n % w == 0), -(-k // STEP) * STEP
    lies = a.is_contiguous() and k == padded
    panels = a if lies else _panels(a, padded)
    pairs = _pairs(b, width, padded)
    c = torch.empty((m, n), dtype=torch.float32, device="cpu") if out is None or not out.is_contiguous() else out
    rows = min(SHARED_ROWS if helpers and m >= SHARED_ROWS else ROWS, m)

    def multiply(units: Iterator[tuple[list[int], int]]) -> None:
        # Addresses are taken here, so that what they lead to lives as long as a thread that writes there.
        of_a, of_b = address(panels, torch.bfloat16, m * padded), address(pairs, torch.bfloat16, n * padded)
        of_c = address(c, torch.float32, m * n)
        try:
            for starts, j in units:
                for i in starts:
                    for at in range(0, padded, DEPTH):
                        depth = min(DEPTH, padded - at)
                        brgemm(
                            rows,
                            width,
                            depth,
                            k if lies else depth,
                            width,
                            n,
                            at > 0,
                            of_a + 2 * (i * k + at if lies else m * at + i * depth),
                            of_b + 2 * width * (j * padded + at),
                            of_c + 4 * (i * n + j * width),
                            True,
                        )
        finally:
            # What it holds is the thread's.
            release(True)

    # Columns inside: the rows of a block stay in the second cache.
    team.share(multiply, [(starts, j) for starts in _starts(m, rows) for j in range(n // width)], helpers)
    return c


def _starts(m: int, rows: int) -> list[list[int]]:
    """Where blocks of rows begin, those that one thread must do one after the other together.

    The last block begins among the rows of the one before, and writes them once more.
    """
    starts = [[i] for i in range(0, m - rows + 1, rows)]
    if m % rows:
        starts[-1].append(m - rows)
    return starts


def _panels(a: Tensor, padded: int) -> Tensor:
    """a [m, k] in panels [m, DEPTH] one after the other, the last one narrower and filled up with zeros."""
    m, k = a.shape
    out = scratch.room("panels", (m * padded,), torch.bfloat16)
    for at in range(0, padded, DEPTH):
        depth = min(DEPTH, padded - at)
        panel = out[m * at : m * (at + depth)].view(m, depth)
        if at + depth <= k:
            # One panel at a time: torch is quick with a transpose of two dimensions.
            panel.copy_(a[:, at : at + depth])
        else:
            panel[:, : k - at].copy_(a[:, at:])
            panel[:, k - at :].zero_()
    return out


def _pairs(b: Tensor, width: int, padded: int) -> Tensor:
    """b [n, k] in panels of columns, two consecutive k beside each other: [n / width, padded / 2, width, 2]."""
    n, k = b.shape
    out = scratch.room("pairs", (n // width, padded // 2, width, 2), torch.bfloat16)
    even, words = k // 2, out.view(torch.int32).squeeze(-1)
    if b.is_contiguous() and k % 2 == 0 and b.storage_offset() % 2 == 0:
        # A panel at a time: torch is quick with a transpose of two dimensions.
        for panel, lines in zip(words, b.view(torch.int32).split(width), strict=True):
            panel[:even].copy_(lines.t())
    else:
        bits = b.t().view(torch.int16)
        step = max(1, scratch.PIECE // (4 * n))
        for at in range(0, even, step):
            first, second = (bits[i + 2 * at : 2 * min(at + step, even) : 2] for i in (0, 1))
            word = scratch.room("word", first.shape, torch.int32).copy_(second).bitwise_left_shift_(16)
            word |= scratch.room("half", first.shape, torch.int32).copy_(first).bitwise_and_(0xFFFF)
            words[:, at : at + word.shape[0]].copy_(word.unflatten(1, (-1, width)).transpose(0, 1))
    out[:, even:].zero_()
    if k % 2:
        out[:, even, :, 0] = b.unflatten(0, (-1, width))[:, :, -1]
    return out


def address(t: Tensor, dtype: torch.dtype, elements: int) -> int:
    """Where the memory of a tensor begins, for C, which looks at nothing.

    Raises:
        ValueError: it is not of this dtype on the CPU, or not contiguous, or has another number of elements.
    """
    at = t.data_ptr() if t.dtype is dtype and t.device.type == "cpu" and t.is_contiguous() else 0
    if at == 0 or t.numel() != elements:
        raise ValueError(
            f"memory for C must be {elements} contiguous elements of {dtype} on the CPU; this is {t.numel()} of "
            f"{t.dtype} on {t.device} with strides {t.stride()}"
        )
    return at


@cache
def _functions() -> tuple[Any, Any] | None:
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return None
    try:
        library = team.libtorch()
        brgemm, release = library[_NAME], library[_RELEASE]
    except (OSError, AttributeError):
        return None
    size, yes, pointer = ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p
    brgemm.argtypes, brgemm.restype = [*[size] * 6, yes, pointer, pointer, pointer, yes], None
    release.argtypes, release.restype = [yes], None
    functions = brgemm, release
    return functions if _is_right(functions) else None


def _is_right(functions: tuple[Any, Any]) -> bool:
    """A product that only the right blocks, order and sums get right."""
    a = (torch.arange(3 * 8, dtype=torch.float32, device="cpu") % 11 - 5).view(3, 8)
    b = (torch.arange(64 * 8, dtype=torch.float32, device="cpu") % 7 - 3).view(64, 8)
    return torch.equal(_product(functions, a.bfloat16(), b.bfloat16(), 0), a @ b.t())
