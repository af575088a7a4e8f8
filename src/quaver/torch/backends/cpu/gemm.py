"""matmul on a CPU, fast and exact: eight-bit operands are decoded to bf16 values and multiplied with float32 sums.

Every E4M3, E5M2 and E2M1 value is a bf16 value, also after multiplying by a power of two or by an E4M3 scale, and the
product of two of them is exact in float32. So a bf16 GEMM, or a float32 GEMM that works in bf16 inside, adds up
exactly the products that the recipe defines (docs/design/numerics.md). No setting of the process is changed for
that: other threads would multiply by it. Where torch multiplies bf16 without the processor's help, which
takes up to forty times as long as float32, values are decoded to float32.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from quaver.torch.backends.cpu import quantize
from quaver.torch.backends.cpu.decode import ROWS, decode, folds_exactly, rescales_exactly, values_of
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized

# ---- team ------------------------------------------------------------------------------------------------
# The threads by which torch's operations share work on a CPU, lent to work of Python's that releases its lock.
#
# torch's threads are a team of OpenMP's, and wait for the next operation actively, each on a core of its own: threads
# of another kind, woken right after an operation, find those cores taken for milliseconds. So the team itself is
# asked, by the call that a compiler makes of `#pragma omp parallel` (libgomp's ABI, which LLVM's library has too). It
# is taken from what libtorch was linked with; where that has no such call, and in a fork, whose parent's team is gone,
# the caller works alone.

Unit = TypeVar("Unit")
_PARALLEL = "GOMP_parallel"
#: What a thread of the team runs, given an address that nothing reads.
_Inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_process = os.getpid()


def share(work: Callable[[Iterator[Unit]], None], units: Sequence[Unit], helpers: int) -> None:
    """Call work in this thread and in so many others, all with one iterator of the units: who is free takes the next.

    Returns once every unit is done. An exception drops the units that are left, and is raised when all have ended.
    """
    left, errors = iter(units), list[BaseException]()
    parallel = _parallel() if helpers and os.getpid() == _process else None
    if parallel is None:
        return work(left)

    def inside(_: int) -> None:
        # ctypes would print what is raised here, an interrupt too, and go on.
        try:
            work(left)
        except BaseException as error:
            errors.append(error)
            for _unit in left:
                pass

    parallel(_Inside(inside), None, helpers + 1, 0)
    if errors:
        raise errors[0]


@cache
def _parallel() -> Any | None:
    """GOMP_parallel(what, its argument, threads, flags), or None."""
    try:
        parallel = libtorch()[_PARALLEL]
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [_Inside, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def libtorch() -> ctypes.CDLL:
    """What torch computes with on a CPU, and through it all that it was linked with. Raises: OSError."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


# ---- brgemm ----------------------------------------------------------------------------------------------
# float32 = bf16 @ bf16.T on CPUs whose vector units multiply bf16, block by block.
#
# No operation of torch has this product on a CPU: a bf16 one rounds its result to bf16, and the setting that lets
# float32 ones multiply in bf16 inside belongs to the process. But the block of which torch makes its own CPU attention
# does just this: `at::native::cpublas::brgemm` (aten/src/ATen/native/CPUBlas.h), which libtorch exports. It is taken
# from there where its name, which spells out its arguments, is found, where the processor has the instructions, and
# where a first product comes out right; otherwise nothing of this file runs. A block works on one thread; torch's
# threads share a product's blocks, and the bits are those of one thread.
#
# libtorch compiles a block for each combination of sizes and strides and keeps it for the life of the thread, tens of
# kilobytes each. So what depends on the number of tokens is cut and packed to a few sizes.

#: brgemm(m, n, k, lda, ldb, ldc, add to C, A, B in pairs of rows, C, B is in pairs), and what ends its use.
_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
#: Rows, columns and depth of a block. Where threads share, more rows: each block ends with asking for Python's lock.
BRGEMM_ROWS, SHARED_ROWS, COLUMNS, DEPTH = 128, 256, (64, 32), 512
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
    rows = min(SHARED_ROWS if helpers and m >= SHARED_ROWS else BRGEMM_ROWS, m)

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
    share(multiply, [(starts, j) for starts in _starts(m, rows) for j in range(n // width)], helpers)
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
    out = quantize.buffer("panels", (m * padded,), torch.bfloat16)
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
    out = quantize.buffer("pairs", (n // width, padded // 2, width, 2), torch.bfloat16)
    even, words = k // 2, out.view(torch.int32).squeeze(-1)
    if b.is_contiguous() and k % 2 == 0 and b.storage_offset() % 2 == 0:
        # A panel at a time: torch is quick with a transpose of two dimensions.
        for panel, lines in zip(words, b.view(torch.int32).split(width), strict=True):
            panel[:even].copy_(lines.t())
    else:
        bits = b.t().view(torch.int16)
        step = max(1, quantize.PIECE // (4 * n))
        for at in range(0, even, step):
            first, second = (bits[i + 2 * at : 2 * min(at + step, even) : 2] for i in (0, 1))
            word = quantize.buffer("word", first.shape, torch.int32).copy_(second).bitwise_left_shift_(16)
            word |= quantize.buffer("half", first.shape, torch.int32).copy_(first).bitwise_and_(0xFFFF)
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
        library = libtorch()
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


# ---- narrow ----------------------------------------------------------------------------------------------
# Products with few rows, on a CPU: a weight times one token, or a handful of them.
#
# Such a product reads its wide operand once, so what it costs is decoding. The wide operand is decoded a slice at a
# time, small enough to stay in the cache, and multiplied in float32 at once. A matrix times a few vectors is summed in
# one long row, whose errors add up: k is cut into pieces, and their sums are added in float64.

#: Elements that are decoded at a time: 3 MB with what decoding needs.
SLICE = 1 << 19
#: Longest sum in float32: 256 of them lose 5e-7 even where one product outweighs all others.
PIECE = 256
#: The same where the sum goes along the memory, in as many parallel sums as a vector has lanes.
CONTIGUOUS_PIECE = 1024
#: So few outputs may all happen to cancel, which only float64 survives.
EXACT = 16


def narrow_matmul(a: Quantized, b: Quantized) -> Tensor:
    """a [m, k] @ b [n, k].T with scales, float64 [m, n] row by row, for small m or small n.

    Bounded: relative RMS below 1e-6 of float64 on the same operands.
    """
    return _narrow_matmul(a, b) if a.shape[0] <= b.shape[0] else _narrow_matmul(b, a).t().contiguous()


def _narrow_matmul(few: Quantized, wide: Quantized) -> Tensor:
    exact = few.shape[0] * wide.shape[0] <= EXACT
    left = None if exact else decode(few, half=False, tiny=False, slot="left")
    if left is None:
        return reference.double(few) @ reference.double(wide).t()
    x = left[0]  # [m, k]
    rows, columns = wide.lying_shape
    step = _step(wide, columns)
    if wide.transposed:
        y = torch.zeros(x.shape[0], columns, dtype=torch.float64, device="cpu")
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y += _times(x[:, start:stop], _lying_rows(wide, start, stop), PIECE)
    else:
        y = torch.empty(x.shape[0], rows, dtype=torch.float64, device="cpu")
        piece = CONTIGUOUS_PIECE if x.shape[0] == 1 else PIECE
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y[:, start:stop] = _times(x, _lying_rows(wide, start, stop), piece)
    return y.mul_(left[1])


def _step(q: Quantized, columns: int) -> int:
    """Rows of one slice, whole blocks of them."""
    block = q.lying_block[0] or 1
    return max(SLICE // columns // block, 1) * block


def _lying_rows(q: Quantized, start: int, stop: int) -> Quantized:
    """Some rows of an operand as it lies, from the start of a block on."""
    scale, block = q.scale, q.lying_block[0]
    if isinstance(scale, Tensor) and block is not None:
        scale = scale[start // block : -(-stop // block)]
    shape = stop - start, q.lying_shape[1]
    return Quantized(
        q.data[start:stop], scale, q.spec, shape[::-1] if q.transposed else shape, q.transposed, q.tensor_factor
    )


def _times(x: Tensor, part: Quantized, piece: int) -> Tensor:
    """x [m, k] @ part [r, k].T, float64 [m, r]."""
    decoded = decode(part, half=False, tiny=False, slot="right")
    if decoded is None:
        # Scales so far apart, or not finite, that float32 could not hold a product: float64 can.
        return x.double() @ reference.double(part).t()
    values, scale = decoded
    v = values.t()  # [k, r]
    k = v.shape[0]
    y = torch.mm(x[:, :piece], v[:piece]).double()
    for start in range(piece, k, piece):
        y += torch.mm(x[:, start : start + piece], v[start : start + piece])
    return y.mul_(scale.t() if isinstance(scale, Tensor) else scale)


# ---- gemm ------------------------------------------------------------------------------------------------

#: Up to this m × n × k a plain float32 GEMM is fastest.
SMALL = 1 << 18
#: Products with at most this many rows or columns are multiplied slice by slice.
NARROW = 4
#: Products with at most so many too, where the other operand has so many elements that decoded it leaves the cache.
NARROW_BESIDE = 16, 1 << 22
#: A per-tensor operand of at most this many elements remembers its decoded matrix: decoding costs as much as its GEMM.
REMEMBERED = 4096
#: Products of scales within these can be folded into an eight-bit operand: its values and the sums stay normal.
LIFTS = (2.0**-60, 2.0**60)
_precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Why this implementation does not take the call, or ""."""
    if a.swizzled or b.swizzled:
        return "the scales are in the order of a GPU's GEMM"
    return "" if a.data.is_cpu else "the operands are not on a CPU"


def matmul(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias.

    Args:
        out: of this dtype, where the result is written if it is given.
    Bounded: relative RMS below 1e-6 of float64 on the same operands for float32 output.
    """
    (m, k), n = a.shape, b.shape[0]
    size, few = m * n * k, min(m, n)
    if 0 < size <= SMALL and (few > NARROW or (a.scale.__class__ is float and b.scale.__class__ is float)):
        x, y = decoded(a), decoded(b)
        if x is not None and y is not None:
            x, y = x.t() if a.transposed else x, y if b.transposed else y.t()
            return _written(scaled_product(x, y, _of_rows(a), _of_rows(b), dtype, bias), out)
    if size == 0:
        return _written(reference.matmul(a, b, dtype, bias), out)
    exact = folds_exactly(a) and folds_exactly(b)
    if not exact and _rounds():
        return _written(reference.matmul(a, b, dtype, bias), out)
    if few <= NARROW or (few <= NARROW_BESIDE[0] and max(m, n) * k >= NARROW_BESIDE[1]):
        y = narrow_matmul(a, b)
        return _written((y if bias is None else y + bias).float().to(dtype), out)
    tiny = size <= SMALL
    # A product that torch rounds to bf16 itself.
    half = dtype is torch.bfloat16 and bias is None and not tiny and rescales_exactly(a) and rescales_exactly(b)
    half = half and multiplies_bf16()
    blocked = exact and not half and size >= SMALLEST and takes(m, n, k)
    # Most bear no mark, and a call of Python's that decides so is saved.
    left = (decode if a.mark is None else values_of)(a, half or blocked, tiny, "left")
    right = (decode if b.mark is None else values_of)(b, half or blocked, tiny, "right")
    if left is None or right is None:
        # Scales so far apart, or not finite, that float32 could not hold a product: float64 can.
        return _written(reference.matmul(a, b, dtype, bias), out)
    if blocked:
        y = product(left[0], right[0], out if dtype is torch.float32 else None)
    elif half or dtype is torch.float32:
        y = torch.mm(left[0], right[0].t(), out=out)
    else:
        y = torch.mm(left[0], right[0].t(), out=quantize.buffer("product", (m, n), torch.float32))
    y = rescale(y, left[1], right[1])
    if bias is not None:
        y += bias
    return _written(y if y.dtype is dtype or out is not None else y.to(dtype), out)


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    """A result where it is wanted."""
    return y if out is None or y is out else out.copy_(y)


def decoded(q: Quantized) -> Tensor | None:
    """The float32 values, as they lie, of an operand without its scales; remembered where they are few.

    None unless the product can take the scales: one, or one a row within `ROWS`, which also holds no NaN.
    """
    values = q.decoded
    if values is None:
        if isinstance(q.scale, Tensor):
            if q.spec.block not in ((1, None), (None, None)) or q.scale.dtype is not torch.float32:
                return None
            low, high = torch.aminmax(q.scale)
            if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
                return None
        values = q.data.float() if q.data.is_floating_point() else q.lying_values()
        if values.numel() <= REMEMBERED:
            q.decoded = values
    return values


def _of_rows(q: Quantized) -> Tensor | float:
    """Its scales in a column, or its one."""
    return q.scale.t() if q.transposed and isinstance(q.scale, Tensor) else q.scale


_nothing = torch.zeros((), dtype=torch.float32, device="cpu")


def scaled_product(
    left: Tensor, right: Tensor, a: Tensor | float, b: Tensor | float, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """left [m, k] @ right [k, n] × a × b + bias, of a few thousand elements, where every call counts; see `rescale`."""
    scale = a * b if isinstance(a, float) and isinstance(b, float) else 0.0
    if LIFTS[0] < scale < LIFTS[1] and math.frexp(scale)[0] == 0.5:
        # A power of two: each sum is what it would be without it.
        y = torch.addmm(_nothing, left, right, beta=0, alpha=scale)
    else:
        y = rescale(torch.mm(left, right), a, b)
    if bias is not None:
        y += bias
    if dtype is torch.float32:
        return y
    return y.bfloat16() if dtype is torch.bfloat16 else y.to(dtype)


@cache
def multiplies_bf16() -> bool:
    """Whether torch hands bf16 products on a CPU to oneDNN; else it computes them number by number."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)())


def _rounds() -> bool:
    """Whether the process has asked torch to round the operands of float32 products on a CPU."""
    return _precision.fp32_precision not in ("none", "ieee")


def rescale(y: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """y × a × b in place: a number or a column [m, 1], and a number or a column [n, 1]."""
    if isinstance(a, float) and isinstance(b, float):
        return _rescale(y, a * b)
    for s in (a, b.t() if isinstance(b, Tensor) else b):
        y = y.mul_(s) if isinstance(s, Tensor) else _rescale(y, s)
    return y


def _rescale(y: Tensor, s: float) -> Tensor:
    if s == 1.0:
        return y
    if 1e-37 < s < 1e37 or s != s:
        return y.mul_(s)
    # The product of two scales may leave float32 though the result does not: apply it in halves.
    half = math.ldexp(1.0, math.frexp(s)[1] // 2)
    return y.mul_(half).mul_(s / half)
