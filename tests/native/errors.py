"""Wrong and borderline calls of an exported library, each with the status that it must return.

`python -m tests.native.errors FOLDER` runs them against the stub driver; it prints how many there are.
"""

import ctypes as ct
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.native import library as c
from tests.native.library import History, Library, Log, Loss, Matrix, NormOptions, Options, Parameter, RopeOptions, Step

#: Addresses that nothing reads, and the library's workspace.
DATA, SCALE, FACTOR, WORKSPACE = 1 << 16, 1 << 17, 1 << 12, 1 << 20


def x(**values: Any) -> Matrix:
    """A bfloat16 matrix of 256 × 128."""
    return Matrix(**{"data": DATA, "rows": 256, "columns": 128, "stride": 128, **values})


def q(**values: Any) -> Matrix:
    """Its MX codes."""
    given = {"data": DATA, "scale": SCALE, "factor": FACTOR, "rows": 256, "columns": 128, "stride": 128}
    return Matrix(**{**given, "dtype": c.E4M3, "block": c.MX, **values})


def qt(**values: Any) -> Matrix:
    return q(**{"rows": 128, "columns": 256, "stride": 256, **values})


def nv(**values: Any) -> Matrix:
    return q(**{"dtype": c.E2M1, "block": c.NV, "stride": 64, **values})


def larger(last: int) -> Matrix:
    """A matrix of a caller whose struct has one more field."""

    class Newer(Matrix):
        _fields_ = (("more", ct.c_int64),)

    return Newer(**{name: getattr(x(), name) for name, _ in Matrix._fields_} | {"size": ct.sizeof(Newer), "more": last})


def quantize_cases() -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    """Yield statuses, the mistakes, and the arguments of `Library.quantize`."""
    tensor = {"block": c.TENSOR}
    yield c.OK, "", (x(), q())
    yield c.OK, "both orientations", (x(), q(), qt())
    yield c.OK, "no rows", (x(rows=0), q(rows=0))
    yield c.OK, "no columns", (x(columns=0, stride=0), q(columns=0, stride=0))
    yield c.OK, "the longest stride", (x(stride=2**23), q())
    yield c.OK, "an address of a multiple of 2", (x(data=DATA + 2), q())
    yield c.OK, "a newer caller's struct", (larger(0), q())
    yield c.SIZE, "a newer caller's field is set", (larger(1), q())
    yield c.SIZE, "size not set", (x(size=0), q())
    yield c.SIZE, "size of the codes too small", (x(), q(size=56))
    yield c.SIZE, "size of the options too small", (x(), q(), None, 0, Options(size=8))
    yield c.NULL, "no x", (None, q())
    yield c.NULL, "no result", (x(), None)
    yield c.NULL, "no data", (x(data=0), q())
    yield c.NULL, "no codes", (x(), q(data=0))
    yield c.NULL, "no scales", (x(), q(scale=0))
    yield c.NULL, "no amax", (x(), q(**tensor))
    yield c.NULL, "a factor without the newest amax", (x(), q(**tensor), None, FACTOR, Options(factor=FACTOR))
    yield c.NULL, "no factor of NVFP4", (x(), nv(factor=0), None, FACTOR)
    yield c.NULL, "no amax of NVFP4", (x(), nv())
    yield c.NULL, "no noise count", (x(), nv(), None, FACTOR, Options(stochastic=1))
    yield c.FORMAT, "x of codes", (x(dtype=c.E4M3), q())
    yield c.FORMAT, "an unknown dtype", (x(dtype=99), q())
    yield c.FORMAT, "a negative dtype", (x(dtype=-1), q())
    yield c.FORMAT, "x with scales", (x(block=c.TENSOR), q())
    yield c.FORMAT, "four bits in MX blocks", (x(), q(dtype=c.E2M1))
    yield c.FORMAT, "eight bits in NVFP4 blocks", (x(), q(block=c.NV))
    yield c.FORMAT, "an unknown block", (x(), q(block=9))
    yield c.FORMAT, "no block", (x(), q(block=c.NONE))
    yield c.FORMAT, "codes in high precision", (x(), q(dtype=c.BF16))
    yield c.FORMAT, "stochastic FP8", (x(), q(), None, 0, Options(stochastic=1, count=4096))
    yield c.FORMAT, "rotated FP8", (x(), q(), None, 0, Options(hadamard=1))
    yield c.FORMAT, "rotated squares", (x(), nv(block=c.NV_SQUARE), None, FACTOR, Options(hadamard=1))
    yield c.FORMAT, "a factor of blocks", (x(), q(), None, 0, Options(factor=FACTOR, newest=FACTOR))
    yield c.FORMAT, "a flag of 2", (x(), q(), None, 0, Options(power_of_two=2))
    yield c.SHAPE, "negative rows", (x(rows=-1), q(rows=-1))
    yield c.SHAPE, "negative columns", (x(columns=-1), q(columns=-1))
    yield c.SHAPE, "2^31 rows", (x(rows=2**31), q(rows=2**31))
    yield c.SHAPE, "2^40 elements", (x(rows=2**30, columns=1025, stride=1025), q())
    yield c.SHAPE, "too many rows for the grid", (x(rows=2**24), q(rows=2**24))
    yield c.SHAPE, "a stride below the row", (x(stride=127), q())
    yield c.SHAPE, "a stride above 2^23", (x(stride=2**23 + 1), q())
    yield c.SHAPE, "a stride of codes beyond their padding", (x(), q(stride=144))
    yield (
        c.SHAPE,
        "noise for rows that fours do not fill",
        (
            x(columns=126),
            nv(columns=126),
            None,
            FACTOR,
            Options(stochastic=1, count=4096),
        ),
    )
    yield c.ALIGNMENT, "x at an odd address", (x(data=DATA + 1), q())
    yield c.ALIGNMENT, "float32 at a multiple of 2", (x(dtype=c.F32, data=DATA + 2), q())
    yield c.ALIGNMENT, "codes at a multiple of 8", (x(), q(data=DATA + 8))
    yield c.ALIGNMENT, "scales at a multiple of 8", (x(), q(scale=SCALE + 8))
    yield c.ALIGNMENT, "amax at a multiple of 2", (x(), q(**tensor), None, FACTOR + 2)
    yield c.ALIGNMENT, "count at a multiple of 4", (x(), nv(), None, FACTOR, Options(stochastic=1, count=4100))
    yield c.MISMATCH, "fewer rows of codes", (x(), q(rows=128))
    yield c.MISMATCH, "a transpose that is none", (x(), q(), q())
    yield c.MISMATCH, "two blocks", (x(), q(), qt(block=c.MX_SQUARE))
    yield c.MISMATCH, "two formats", (x(), q(), qt(dtype=c.E5M2))
    yield c.MISMATCH, "two scales of one tensor", (x(), q(**tensor), qt(scale=SCALE + 64, **tensor), FACTOR)
    yield c.WORKSPACE, "a workspace too small for row amaxes", (x(), q(block=c.ROW), qt(block=c.ROW))
    yield c.NOT_EXPORTED, "a dtype left out", (x(dtype=c.F16), q())
    yield c.NOT_EXPORTED, "a format left out", (x(), q(dtype=c.E5M2))
    yield c.NOT_EXPORTED, "a family left out", (x(), q(block=c.BLOCK_1X128))


def dequantize_cases() -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    y = x
    yield c.NULL, "no codes", (None, y())
    yield c.NULL, "no result", (q(), None)
    yield c.FORMAT, "values as codes", (q(dtype=c.BF16), y())
    yield c.FORMAT, "float16", (q(), y(dtype=c.F16))
    yield c.FORMAT, "bfloat16 of ratios", (q(block=c.TENSOR), y(), 0)
    yield c.SHAPE, "a result with gaps", (q(), y(stride=136))
    yield c.MISMATCH, "another shape", (q(), y(columns=64, stride=64))
    yield c.OK, "no rows", (q(rows=0), y(rows=0))


def history(**values: Any) -> History:
    given = {
        "layers": 2,
        "length": 16,
        "step": 3,
        "column_step": 1,
        "power_of_two": 1,
        "dtypes": (ct.c_int32 * 3)(3, 3, 3),
    }
    return History(**{**given, **values})


def rope(**values: Any) -> RopeOptions:
    three, two = (ct.c_int64 * 3)(4096, 512, 64), (ct.c_int64 * 2)(0, 64)
    given = {"outer": 2, "inner": 8, "heads": 8, "dim": 64, "q_strides": three, "table_strides": two}
    return RopeOptions(**{**given, **values})


def layer_cases(lib: Library) -> Iterator[tuple[int, str, int]]:
    """Yield statuses, the mistakes, and the status of the call."""
    y, silu, swiglu = x(), 6, 13
    yield c.NULL, "no history", lib.roll(None, DATA, DATA)
    yield c.NULL, "no table", lib.roll(history(), 0, DATA)
    yield c.SIZE, "a history without a size", lib.roll(history(size=0), DATA, DATA)
    yield c.SHAPE, "no steps", lib.roll(history(length=0), DATA, DATA)
    yield c.SHAPE, "1025 steps", lib.roll(history(length=1025), DATA, DATA)
    yield c.SHAPE, "negative layers", lib.roll(history(layers=-1), DATA, DATA)
    yield c.FORMAT, "a column of four bits", lib.roll(history(dtypes=(ct.c_int32 * 3)(3, 3, 5)), DATA, DATA)
    yield c.FORMAT, "a flag of 2", lib.roll(history(most_recent=2), DATA, DATA)
    yield c.ALIGNMENT, "a table at a multiple of 4", lib.roll(history(), DATA + 4, DATA)
    yield c.OK, "no layers", lib.roll(history(layers=0), DATA, DATA)
    yield c.FORMAT, "an unknown activation", lib.activate(15, x(), None, y)
    yield c.FORMAT, "a negative activation", lib.activate(-1, x(), None, y)
    yield c.FORMAT, "a value of what has no gate", lib.activate(silu, x(), x(), y)
    yield c.NULL, "no value of a gate", lib.activate(swiglu, x(), None, y)
    yield c.MISMATCH, "gate and value of two dtypes", lib.activate(swiglu, x(), x(dtype=c.F16), y)
    yield c.MISMATCH, "a narrower result", lib.activate(silu, x(), None, x(columns=64, stride=64))
    yield c.SHAPE, "a result with gaps", lib.activate(silu, x(), None, x(stride=136))
    yield c.NOT_EXPORTED, "a family left out", lib.activate(silu, x(), None, y)
    mx, one, delayed = q(), q(block=c.TENSOR), Options(factor=FACTOR)
    yield c.NULL, "no codes", lib.activate_quantize(silu, None, x(), None, None, None)
    yield c.NULL, "no factor", lib.activate_quantize(silu, None, x(), None, one, None, amax=FACTOR)
    yield c.NULL, "no amax", lib.activate_quantize(silu, delayed, x(), None, one, None)
    yield c.FORMAT, "a transpose in blocks", lib.activate_quantize(silu, None, x(), None, mx, qt())
    yield c.FORMAT, "rows", lib.activate_quantize(silu, None, x(), None, q(block=c.ROW), None)
    yield c.MISMATCH, "fewer rows", lib.activate_quantize(silu, None, x(), None, q(rows=64), None)
    yield c.NOT_EXPORTED, "a family left out", lib.activate_quantize(silu, None, x(), None, mx, None)
    yield c.NULL, "no gradient", lib.activate_backward(silu, None, x(), None, x(), None)
    yield c.NULL, "no gradient of the value", lib.activate_backward(swiglu, x(), x(), x(), x(), None)
    rms, layer = NormOptions(gamma=DATA), NormOptions(gamma=DATA, beta=DATA, centred=1)
    yield c.NULL, "no options", lib.norm(None, x(), y, 0, DATA)
    yield c.NULL, "no gamma", lib.norm(NormOptions(), x(), y, 0, DATA)
    yield c.NULL, "no mean of a LayerNorm", lib.norm(layer, x(), y, 0, DATA)
    yield c.NULL, "no place for statistics", lib.norm(rms, x(), y, 0, 0)
    yield c.SIZE, "options without a size", lib.norm(NormOptions(size=0), x(), y, 0, DATA)
    yield c.FORMAT, "beta of an RMSNorm", lib.norm(NormOptions(gamma=DATA, beta=DATA), x(), y, 0, DATA)
    yield (
        c.SHAPE,
        "columns that are no multiple of 8",
        lib.norm(rms, x(columns=127), x(columns=127, stride=127), 0, DATA),
    )
    yield c.SHAPE, "a stride that is no multiple of 8", lib.norm(rms, x(stride=132), y, 0, DATA)
    yield c.ALIGNMENT, "x at a multiple of 8", lib.norm(rms, x(data=DATA + 8), y, 0, DATA)
    yield c.ALIGNMENT, "gamma at a multiple of 8", lib.norm(NormOptions(gamma=DATA + 8), x(), y, 0, DATA)
    yield c.NOT_EXPORTED, "a family left out", lib.norm(rms, x(), y, 0, DATA)
    rows = q(block=c.ROW)
    yield c.NULL, "no codes", lib.norm_quantize(rms, None, x(), None, 0, 0, DATA)
    yield c.NULL, "no factor of the tensor", lib.norm_quantize(rms, None, x(), q(block=c.TENSOR), FACTOR, 0, DATA)
    yield c.NULL, "no amax", lib.norm_quantize(rms, delayed, x(), q(block=c.TENSOR), 0, 0, DATA)
    yield c.FORMAT, "squares", lib.norm_quantize(rms, None, x(), q(block=c.MX_SQUARE), 0, 0, DATA)
    yield c.FORMAT, "four bits", lib.norm_quantize(rms, None, x(), nv(), 0, 0, DATA)
    yield c.FORMAT, "a newest amax", lib.norm_quantize(rms, Options(newest=FACTOR), x(), rows, 0, 0, DATA)
    yield c.MISMATCH, "another shape", lib.norm_quantize(rms, None, x(), q(rows=128), 0, 0, DATA)
    yield c.NOT_EXPORTED, "a family left out", lib.norm_quantize(rms, None, x(), rows, 0, 0, DATA)
    matrices = x(), x(), y
    yield c.NULL, "no partial sums", lib.norm_backward(rms, matrices, (0, DATA, DATA, 0, 0))
    yield c.NULL, "no gradient of beta", lib.norm_backward(layer, matrices, (DATA, DATA, DATA, 0, DATA))
    yield c.SHAPE, "a gradient with odd rows", lib.norm_backward(rms, (x(stride=132), x(), y), (0, DATA, DATA, 0, DATA))
    q_only = DATA, 0, DATA, 0, DATA, DATA
    yield c.NULL, "no options", lib.rope(None, *q_only)
    yield c.NULL, "no table", lib.rope(rope(), DATA, 0, DATA, 0, DATA, 0)
    yield c.NULL, "no result for k", lib.rope(rope(k_heads=8), DATA, DATA, DATA, 0, DATA, DATA)
    yield c.SIZE, "options without a size", lib.rope(rope(size=0), *q_only)
    yield c.SHAPE, "another head", lib.rope(rope(dim=96), *q_only)
    yield c.SHAPE, "heads of k without k", lib.rope(rope(k_heads=8), *q_only)
    yield c.SHAPE, "heads 2^31 apart", lib.rope(rope(q_strides=(ct.c_int64 * 3)(0, 0, 2**28)), *q_only)
    yield c.FORMAT, "codes", lib.rope(rope(dtype=c.E4M3), *q_only)
    yield c.ALIGNMENT, "q at an odd address", lib.rope(rope(), DATA + 1, 0, DATA, 0, DATA, DATA)
    yield c.OK, "no tokens", lib.rope(rope(inner=0), *q_only)
    yield c.NULL, "no targets", lib.cross_entropy(Loss(), x(), 0, DATA)
    yield c.NULL, "no losses", lib.cross_entropy(Loss(), x(), DATA, 0)
    yield c.SIZE, "options without a size", lib.cross_entropy(Loss(size=0), x(), DATA, DATA)
    yield c.FORMAT, "weights without a gradient", lib.cross_entropy(Loss(weights=DATA), x(), DATA, DATA)
    yield c.ALIGNMENT, "targets at a multiple of 4", lib.cross_entropy(Loss(), x(), DATA + 4, DATA)
    yield c.NOT_EXPORTED, "a family left out", lib.cross_entropy(Loss(), x(), DATA, DATA)


def optimizer_cases(lib: Library) -> Iterator[tuple[int, str, int]]:
    """Yield statuses, the mistakes, and the status of the call."""
    row, chunks = (ct.c_int64 * 20)(), (ct.c_int32 * 3 * 64)()

    def write(step: Step | None, index: int = 0, **values: Any) -> int:
        given = {"rows": 64, "columns": 128, "weight": DATA, "first": DATA, "second": DATA, "gradient": DATA}
        return lib.step_row(step, Parameter(**{**given, "count": DATA, **values}), index, row, chunks)

    def go(step: Step | None, programs: int = 2, parameters: int = 1, chunks: int = DATA, table: int = DATA) -> int:
        return lib.adamw_step(step, programs, parameters, chunks, table, DATA, DATA)

    f32 = Step(weight=c.F32, gradient=c.F32)
    bf16, eight = Step(weight=c.BF16, gradient=c.F32), Step(weight=c.F32, gradient=c.F32, moments=1)
    even, factored = Step(weight=c.F32, gradient=c.F32, even=1), Step(weight=c.F32, gradient=c.F32, factored=1)
    yield c.OK, "a parameter", write(f32)
    yield c.OK, "an even parameter", write(even)
    yield c.NULL, "no formats", write(None)
    yield c.NULL, "no parameter", lib.step_row(f32, None, 0, row, chunks)
    yield c.NULL, "no row", lib.step_row(f32, Parameter(rows=1, columns=1), 0, None, chunks)
    yield c.NULL, "no gradient", write(f32, gradient=0)
    yield c.NULL, "no step count", write(f32, count=0)
    yield c.NULL, "no other half of a weight", write(bf16)
    yield c.NULL, "no scales of a moment", write(eight, first_scale=DATA)
    yield c.NULL, "no factor", write(factored)
    yield c.SIZE, "formats without a size", write(Step(size=0))
    yield c.SIZE, "a parameter without a size", write(f32, size=0)
    yield c.FORMAT, "a factor of unfactored gradients", write(f32, factor=DATA)
    yield c.FORMAT, "weights of float16", write(Step(weight=c.F16, gradient=c.F32))
    yield c.FORMAT, "gradients of codes", write(Step(weight=c.F32, gradient=c.E4M3))
    yield c.FORMAT, "other moments", write(Step(weight=c.F32, gradient=c.F32, moments=2))
    yield c.SHAPE, "no rows", write(f32, rows=0)
    yield c.SHAPE, "2^36 elements and more", write(f32, rows=2**30, columns=65)
    yield c.SHAPE, "2^31 blocks", write(f32, rows=2**31, columns=1)
    yield c.SHAPE, "a negative index", write(f32, -1)
    yield c.SHAPE, "a negative offset", write(f32, offset=-1)
    yield c.ALIGNMENT, "float32 at a multiple of 2", write(f32, weight=DATA + 2)
    yield c.ALIGNMENT, "an even parameter at a multiple of 8", write(even, weight=DATA + 8)
    yield c.ALIGNMENT, "an even parameter of 65 columns", write(even, columns=65)
    yield c.NULL, "no formats", go(None)
    yield c.NULL, "no chunks", go(f32, chunks=0)
    yield c.SHAPE, "2^31 programs", go(f32, 2**31)
    yield c.ALIGNMENT, "a table at a multiple of 8", go(f32, table=DATA + 8)
    yield c.OK, "no programs", go(f32, 0)
    yield c.NOT_EXPORTED, "a family left out", go(f32)


def run(lib: Library, log: Log) -> int:
    """Run all cases; returns their number."""
    count = 0

    def check(status: int, wanted: int, what: str) -> None:
        nonlocal count
        count += 1
        assert status == wanted, f"{what}: {lib.text(status)!r}, not {lib.text(wanted)!r}"
        launches = log.read()
        assert status == c.OK or not launches, f"{what} launched {launches}"

    nothing = ct.c_void_p()
    check(lib.c.quaver_create(None, ct.c_void_p(WORKSPACE), ct.c_int64(16)), c.NULL, "no handle to write")
    check(lib.create(0, 16), c.NULL, "no workspace")
    check(lib.create(WORKSPACE + 8, 16), c.ALIGNMENT, "a workspace at a multiple of 8")
    check(lib.create(WORKSPACE, 15), c.WORKSPACE, "a workspace of 15 bytes")
    for arch in ("80", "100", "120"):
        os.environ["STUB_ARCH"] = arch
        check(lib.create(WORKSPACE, 16), c.ARCHITECTURE, f"sm_{arch}")
    os.environ.pop("STUB_ARCH")
    os.environ["STUB_FAILS"] = "cuCtxGetDevice"
    check(lib.create(WORKSPACE, 16), c.DRIVER, "no context")
    os.environ.pop("STUB_FAILS")
    check(lib.create(WORKSPACE, 16), c.OK, "a handle")
    check(lib.c.quaver_quantize(nothing, None, ct.byref(x()), ct.byref(q()), None, None, None), c.NULL, "no handle")
    check(lib.c.quaver_preload(nothing), c.NULL, "no handle")
    check(lib.c.quaver_destroy(nothing), c.OK, "no handle")
    check(lib.amax(x(), 0), c.NULL, "no amax")
    check(lib.amax(x(), FACTOR), c.OK, "amax")
    check(lib.amax(x(block=c.MX), FACTOR), c.FORMAT, "amax of codes")
    for failing, code in (("cuModuleLoadData", 999), ("cuModuleGetFunction", 999), ("cuLaunchKernel", 999)):
        os.environ["STUB_FAILS"] = failing
        check(lib.quantize(x(), q()), c.DRIVER, failing)
        assert lib.c.quaver_last_driver_error(lib.handle) == code
        os.environ.pop("STUB_FAILS")
    for wanted, what, arguments in quantize_cases():
        check(lib.quantize(*arguments), wanted, what)
    for wanted, what, arguments in dequantize_cases():
        check(lib.dequantize(*arguments), wanted, what)
    for wanted, what, status in (*layer_cases(lib), *optimizer_cases(lib)):
        check(status, wanted, what)
    check(lib.c.quaver_preload(lib.handle), c.OK, "all kernels")
    check(lib.c.quaver_destroy(lib.handle), c.OK, "a handle")
    return count


def sizes(lib: Library) -> None:
    """Check the sizes of buffers against the layouts of Python."""
    for n in range(300):
        assert lib.c.quaver_row_bytes(n, c.E4M3) == lib.c.quaver_row_bytes(n, c.E5M2) == -(-n // 16) * 16
        assert lib.c.quaver_row_bytes(n, c.E2M1) == -(-n // 32) * 16
        assert lib.c.quaver_row_bytes(n, c.F32) == 2 * lib.c.quaver_row_bytes(n, c.BF16) == 4 * n
        assert lib.c.quaver_workspace_bytes(n) == max(16, 4 * (n + -(-n // 64)))
    for rows, columns in ((1, 1), (128, 128), (129, 129), (300, 700), (513, 64)):
        down = -(-rows // 128)
        for block, width in ((c.MX, 128), (c.MX_SQUARE, 128), (c.NV, 64), (c.NV_SQUARE, 64)):
            assert lib.c.quaver_scale_bytes(rows, columns, block) == down * -(-columns // width) * 512
        assert lib.c.quaver_scale_bytes(rows, columns, c.TENSOR) == 4
        assert lib.c.quaver_scale_bytes(rows, columns, c.ROW) == 4 * rows
        assert lib.c.quaver_scale_bytes(rows, columns, c.BLOCK_1X128) == 4 * rows * -(-columns // 128)
        assert lib.c.quaver_scale_bytes(rows, columns, c.BLOCK_128X128) == 16 * down * -(-columns // 512)
    texts = {lib.text(status) for status in range(c.CUBLAS + 1)}
    assert len(texts) == c.CUBLAS + 1
    assert lib.text(-1) == lib.text(c.CUBLAS + 1) == "unknown status"


if __name__ == "__main__":
    exported = Library(Path(sys.argv[1]) / "libquaver.so")
    sizes(exported)
    print(run(exported, Log(Path(os.environ["STUB_LOG"]))))
