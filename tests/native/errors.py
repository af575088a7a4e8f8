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
from tests.native.library import Library, Log, Matrix, Options

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
    """Yield statuses, what is wrong, and the arguments of `Library.quantize`."""
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
    texts = {lib.text(status) for status in range(c.MEMORY + 1)}
    assert len(texts) == c.MEMORY + 1
    assert lib.text(-1) == lib.text(c.MEMORY + 1) == "unknown status"


if __name__ == "__main__":
    exported = Library(Path(sys.argv[1]) / "libquaver.so")
    sizes(exported)
    print(run(exported, Log(Path(os.environ["STUB_LOG"]))))
