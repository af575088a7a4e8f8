"""GEMMs on a CPU, fast and exact: eight-bit operands are decoded to bf16 values and multiplied with float32 sums.

Every E4M3, E5M2 and E2M1 value is a bf16 value, also after multiplication by a power of two or an E4M3 scale, and the
product of two of them is exact in float32. So a bf16 GEMM with float32 output, or a float32 GEMM that uses bf16
internally, sums exactly the products that the recipe defines (docs/design/numerics.md). No process-wide setting is
changed for that, because it would affect other threads. If torch has no bf16 instructions, which makes bf16 GEMMs up to
forty times slower than float32, values are decoded to float32.
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
from quaver.torch.backends.cpu.decode import ROWS, decode, decodes_exactly_to_bf16, rescales_exactly, values_of
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import called_while_traced

# ---- thread team: run Python work on torch's OpenMP threads ----
# torch's OpenMP threads wait actively for the next operation, each on its own core. Threads of another pool, started
# right after an operation, find those cores busy for milliseconds. So the work runs on the same team, through the
# function that a compiler calls for `#pragma omp parallel` (libgomp's ABI, also in LLVM's library). It comes from the
# library that libtorch is linked with. Without that function, and in a fork, where the team no longer exists, the
# caller works alone.

Unit = TypeVar("Unit")
_PARALLEL = "GOMP_parallel"
#: Function that each thread of the team runs; its argument is unused.
_Inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_process = os.getpid()


def run_on_threads(work: Callable[[Iterator[Unit]], None], units: Sequence[Unit], helpers: int) -> None:
    """Run `work` in this thread and `helpers` others with one shared iterator of units, so that free threads take the
    next.

    Returns once all units are done. After an exception the remaining units are dropped, and it is raised when all
    threads have ended.
    """
    left, errors = iter(units), list[BaseException]()
    parallel = _parallel() if helpers and os.getpid() == _process else None
    if parallel is None:
        return work(left)

    def inside(_: int) -> None:
        # ctypes would print an exception, even KeyboardInterrupt, and continue.
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
    """Return GOMP_parallel(function, argument, threads, flags), or None."""
    try:
        parallel = libtorch()[_PARALLEL]
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [_Inside, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def libtorch() -> ctypes.CDLL:
    """Return libtorch_cpu with the libraries it is linked to. Raises OSError if it cannot be loaded."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


# ---- brgemm: float32 = bf16 @ bf16.T, block by block ----
# torch has no CPU operation with this product: its bf16 GEMM rounds the result to bf16, and the setting that lets
# float32 GEMMs use bf16 internally is process-wide. The block that torch's CPU attention is made of does it:
# `at::native::cpublas::brgemm` (aten/src/ATen/native/CPUBlas.h), exported by libtorch. It is used if its mangled name,
# which encodes its arguments, is found, if the processor has the instructions, and if a test product is right. Each
# block runs on one thread; torch's threads share the blocks of a product, and the bits equal those of one thread.
#
# libtorch compiles a block of tens of kilobytes for each combination of sizes and strides, and caches it for the life
# of the thread. So whatever depends on the number of tokens is cut and packed to a few sizes.

#: Mangled names of brgemm(m, n, k, lda, ldb, ldc, accumulate, A, B, C, B is in pairs of rows) and of its release
#: function.
_NAME = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
#: Rows, columns and depth of a block. Shared products use more rows, because each block ends by taking the GIL.
BRGEMM_ROWS, SHARED_ROWS, COLUMNS, DEPTH = 128, 256, (64, 32), 512
#: Multiple to which k is padded with zeros.
STEP = 32
#: Fewest rows and smallest m × n × k; below them plain float32 is faster, because packing b costs as much as many rows.
FEWEST, SMALLEST = 128, 1 << 23


def brgemm_supports(m: int, n: int, k: int) -> bool:
    """Return True if brgemm supports a product [m, k] @ [n, k].T."""
    return m >= FEWEST and m * n * k >= SMALLEST and n % COLUMNS[-1] == 0 and _functions() is not None


def brgemm_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply a [m, k] @ b [n, k].T, both bf16 with any strides, n a multiple of 32; returns float32 [m, n].

    Products are exact. Sums of at most 512 of them are accumulated in float32, and then added in float32.

    Args:
        out: written to if it is contiguous.
    """
    functions = _functions()
    assert functions is not None
    # Each thread must get at least `SMALLEST` multiplications to be worth waking.
    threads = min(torch.get_num_threads(), a.numel() * b.shape[0] // SMALLEST)
    return _product(functions, a, b, max(0, threads - 1), out)


@called_while_traced
def available() -> bool:
    """Return True if brgemm is available."""
    return _functions() is not None


def multiply_each(a: Tensor, pairs: Tensor, out: Tensor) -> None:
    """Multiply a [N, m, k] by matrices [k, n] into float32 out [N, m, n], all contiguous, in this thread.

    libtorch compiles a block for each m, n, k and width of `pairs`. Products are exact and added in float32.

    Args:
        pairs: bf16 [N, at least k / 2, at least n, 2]: two consecutive rows of each matrix interleaved.
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
        # The state to release belongs to the thread.
        release(True)


def _product(functions: tuple[Any, Any], a: Tensor, b: Tensor, helpers: int, out: Tensor | None = None) -> Tensor:
    brgemm, release = functions
    (m, k), n = a.shape, b.shape[0]
    width, padded = next(w for w in COLUMNS if n % w == 0), -(-k // STEP) * STEP
    is_padded = a.is_contiguous() and k == padded
    panels = a if is_padded else _panels(a, padded)
    pairs = _pairs(b, width, padded)
    c = torch.empty((m, n), dtype=torch.float32, device="cpu") if out is None or not out.is_contiguous() else out
    rows = min(SHARED_ROWS if helpers and m >= SHARED_ROWS else BRGEMM_ROWS, m)

    def multiply(units: Iterator[tuple[list[int], int]]) -> None:
        # Taking the addresses here keeps the tensors alive as long as a thread that writes to them.
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
                            k if is_padded else depth,
                            width,
                            n,
                            at > 0,
                            of_a + 2 * (i * k + at if is_padded else m * at + i * depth),
                            of_b + 2 * width * (j * padded + at),
                            of_c + 4 * (i * n + j * width),
                            True,
                        )
        finally:
            # The state to release belongs to the thread.
            release(True)

    # Columns are the inner loop, so that the rows of a block stay in the L2 cache.
    run_on_threads(multiply, [(starts, j) for starts in _starts(m, rows) for j in range(n // width)], helpers)
    return c


def _starts(m: int, rows: int) -> list[list[int]]:
    """Return the first rows of all blocks, grouped into those that one thread must do in order.

    The last block may overlap the one before it, and rewrites the common rows.
    """
    starts = [[i] for i in range(0, m - rows + 1, rows)]
    if m % rows:
        starts[-1].append(m - rows)
    return starts


def _panels(a: Tensor, padded: int) -> Tensor:
    """Pack a [m, k] into consecutive panels [m, DEPTH]; the last one is narrower and padded with zeros."""
    m, k = a.shape
    out = quantize.buffer("panels", (m * padded,), torch.bfloat16)
    for at in range(0, padded, DEPTH):
        depth = min(DEPTH, padded - at)
        panel = out[m * at : m * (at + depth)].view(m, depth)
        if at + depth <= k:
            # One panel at a time, because torch transposes two dimensions fast.
            panel.copy_(a[:, at : at + depth])
        else:
            panel[:, : k - at].copy_(a[:, at:])
            panel[:, k - at :].zero_()
    return out


def _pairs(b: Tensor, width: int, padded: int) -> Tensor:
    """Pack b [n, k] into column panels with two consecutive k interleaved: [n / width, padded / 2, width, 2]."""
    n, k = b.shape
    out = quantize.buffer("pairs", (n // width, padded // 2, width, 2), torch.bfloat16)
    even, words = k // 2, out.view(torch.int32).squeeze(-1)
    if b.is_contiguous() and k % 2 == 0 and b.storage_offset() % 2 == 0:
        # One panel at a time, because torch transposes two dimensions fast.
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
    """Return the address of a tensor's memory for C code, after checking dtype, device, layout and size.

    Raises:
        ValueError: the tensor is not of this dtype, not on the CPU, not contiguous, or of another size.
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
    """Return True if a test product is right, which needs the right blocks, order and sums."""
    a = (torch.arange(3 * 8, dtype=torch.float32, device="cpu") % 11 - 5).view(3, 8)
    b = (torch.arange(64 * 8, dtype=torch.float32, device="cpu") % 7 - 3).view(64, 8)
    return torch.equal(_product(functions, a.bfloat16(), b.bfloat16(), 0), a @ b.t())


# ---- narrow products: few rows or few columns ----
# Such a product reads its wide operand once, so its cost is decoding. The wide operand is decoded in slices that fit
# the cache, and multiplied in float32 at once. The errors of one long float32 sum would add up, so k is cut into
# pieces, whose sums are added in float64.

#: Elements decoded at a time: 3 MB including temporaries.
SLICE = 1 << 19
#: Longest float32 sum: 256 terms lose at most 5e-7 even if one product dominates.
PIECE = 256
#: The same for sums along contiguous memory, which run in as many parallel sums as a vector has lanes.
CONTIGUOUS_PIECE = 1024
#: Largest number of outputs for which all may cancel by chance, so that float64 is used.
EXACT = 16


def narrow_matmul(a: Quantized, b: Quantized) -> Tensor:
    """Multiply a [m, k] @ b [n, k].T with scales for small m or small n; returns contiguous float64 [m, n].

    The relative RMS error is below 1e-6 against float64 on the same operands.
    """
    return _narrow_matmul(a, b) if a.shape[0] <= b.shape[0] else _narrow_matmul(b, a).t().contiguous()


def _narrow_matmul(few: Quantized, wide: Quantized) -> Tensor:
    exact = few.shape[0] * wide.shape[0] <= EXACT
    left = None if exact else decode(few, as_bf16=False, tiny=False, slot="left")
    if left is None:
        return reference.double(few) @ reference.double(wide).t()
    x = left[0]  # [m, k]
    rows, columns = wide.stored_shape
    step = _step(wide, columns)
    if wide.transposed:
        y = torch.zeros(x.shape[0], columns, dtype=torch.float64, device="cpu")
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y += _times(x[:, start:stop], _stored_rows(wide, start, stop), PIECE)
    else:
        y = torch.empty(x.shape[0], rows, dtype=torch.float64, device="cpu")
        piece = CONTIGUOUS_PIECE if x.shape[0] == 1 else PIECE
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            y[:, start:stop] = _times(x, _stored_rows(wide, start, stop), piece)
    return y.mul_(left[1])


def _step(q: Quantized, columns: int) -> int:
    """Return the rows of one slice, a multiple of the block height."""
    block = q.stored_block[0] or 1
    return max(SLICE // columns // block, 1) * block


def _stored_rows(q: Quantized, start: int, stop: int) -> Quantized:
    """Return a range of stored rows of an operand, starting at a block boundary."""
    scale, block = q.scale, q.stored_block[0]
    if isinstance(scale, Tensor) and block is not None:
        scale = scale[start // block : -(-stop // block)]
    shape = stop - start, q.stored_shape[1]
    return Quantized(
        q.data[start:stop], scale, q.spec, shape[::-1] if q.transposed else shape, q.transposed, q.tensor_factor
    )


def _times(x: Tensor, part: Quantized, piece: int) -> Tensor:
    """Multiply x [m, k] @ part [r, k].T; returns float64 [m, r]."""
    decoded = decode(part, as_bf16=False, tiny=False, slot="right")
    if decoded is None:
        # float32 cannot represent the products of scales that differ this much or are not finite.
        return x.double() @ reference.double(part).t()
    values, scale = decoded
    v = values.t()  # [k, r]
    k = v.shape[0]
    y = torch.mm(x[:, :piece], v[:piece]).double()
    for start in range(piece, k, piece):
        y += torch.mm(x[:, start : start + piece], v[start : start + piece])
    return y.mul_(scale.t() if isinstance(scale, Tensor) else scale)


# ---- matmul ----

#: Largest m × n × k for which a plain float32 GEMM is fastest.
SMALL = 1 << 18
#: Largest number of rows or columns for which a product is computed slice by slice.
NARROW = 4
#: The same limit if the other operand has at least this many elements, so that it exceeds the cache when decoded.
NARROW_LARGE = 16, 1 << 22
#: Largest per-tensor operand in elements whose decoded values are cached; decoding costs as much as such a GEMM.
REMEMBERED = 4096
#: Range of scale products that addmm receives as alpha: if BLAS multiplies alpha into an eight-bit operand, its
#: values and the sums stay normal.
LIFTS = (2.0**-60, 2.0**60)
_precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def reason(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool = False) -> str:
    """Return why this implementation does not support the call, or ""."""
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
    """Compute a [m, k] @ b [n, k].T + bias in `dtype`.

    The relative RMS error is below 1e-6 against float64 on the same operands for float32 output.

    Args:
        out: tensor of this dtype to write to, or None.
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
    exact = decodes_exactly_to_bf16(a) and decodes_exactly_to_bf16(b)
    if not exact and _rounds():
        return _written(reference.matmul(a, b, dtype, bias), out)
    if few <= NARROW or (few <= NARROW_LARGE[0] and max(m, n) * k >= NARROW_LARGE[1]):
        y = narrow_matmul(a, b)
        return _written((y if bias is None else y + bias).float().to(dtype), out)
    tiny = size <= SMALL
    # torch rounds the product to bf16 itself.
    as_bf16 = dtype is torch.bfloat16 and bias is None and not tiny and rescales_exactly(a) and rescales_exactly(b)
    as_bf16 = as_bf16 and multiplies_bf16()
    blocked = exact and not as_bf16 and size >= SMALLEST and brgemm_supports(m, n, k)
    # Most operands have no key; deciding inline saves a Python call.
    left = (decode if a.decode_cache_key is None else values_of)(a, as_bf16 or blocked, tiny, "left")
    right = (decode if b.decode_cache_key is None else values_of)(b, as_bf16 or blocked, tiny, "right")
    if left is None or right is None:
        # float32 cannot represent the products of scales that differ this much or are not finite.
        return _written(reference.matmul(a, b, dtype, bias), out)
    if blocked:
        y = brgemm_matmul(left[0], right[0], out if dtype is torch.float32 else None)
    elif as_bf16 or dtype is torch.float32:
        y = torch.mm(left[0], right[0].t(), out=out)
    else:
        y = torch.mm(left[0], right[0].t(), out=quantize.buffer("product", (m, n), torch.float32))
    y = rescale(y, left[1], right[1])
    if bias is not None:
        y += bias
    return _written(y if y.dtype is dtype or out is not None else y.to(dtype), out)


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    """Return the result, copied to `out` if one was passed."""
    return y if out is None or y is out else out.copy_(y)


def decoded(q: Quantized) -> Tensor | None:
    """Return the float32 values of an operand without its scales in storage order, cached if there are few.

    Returns None unless scales can be applied to the product: one scale, or one per row within `ROWS` and no NaN.
    """
    values = q.decoded
    if values is None:
        if isinstance(q.scale, Tensor):
            if q.spec.block not in ((1, None), (None, None)) or q.scale.dtype is not torch.float32:
                return None
            low, high = torch.aminmax(q.scale)
            if not (ROWS[0] <= low.item() and high.item() <= ROWS[1]):
                return None
        values = q.data.float() if q.data.is_floating_point() else q.stored_values()
        if values.numel() <= REMEMBERED:
            q.decoded = values
    return values


def _of_rows(q: Quantized) -> Tensor | float:
    """Return the row scales as a column, or the single scale."""
    return q.scale.t() if q.transposed and isinstance(q.scale, Tensor) else q.scale


_nothing = torch.zeros((), dtype=torch.float32, device="cpu")


def scaled_product(
    left: Tensor, right: Tensor, a: Tensor | float, b: Tensor | float, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute left [m, k] @ right [k, n] × a × b + bias for a few thousand elements, with as few torch calls as
    possible.
    """
    scale = a * b if isinstance(a, float) and isinstance(b, float) else 0.0
    if LIFTS[0] < scale < LIFTS[1] and math.frexp(scale)[0] == 0.5:
        # With a power of two the scaled sums equal the unscaled ones times the scale, bit for bit.
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
    """Return True if torch uses oneDNN for bf16 products on a CPU; otherwise it computes them one element at a time."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)())


def _rounds() -> bool:
    """Return True if the process lets torch round the operands of float32 products on a CPU."""
    return _precision.fp32_precision not in ("none", "ieee")


def rescale(y: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """Compute y × a × b in place; a is a number or a column [m, 1], b a number or a column [n, 1]."""
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
    # The product of two scales may leave float32 though the result does not, so it is applied in halves.
    half = math.ldexp(1.0, math.frexp(s)[1] // 2)
    return y.mul_(half).mul_(s / half)
