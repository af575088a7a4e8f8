"""GEMMs of an exported library, with a stub of cublasLt that records its calls.

`python -m tests.native.gemms FOLDER` checks descriptors, layouts and errors; it prints the number of calls.
"""

import ctypes as ct
import os
import sys
from pathlib import Path
from typing import Any

from tests.native import library as c
from tests.native.library import GemmOptions, Library, Log, Matrix

A, B, Y, SCALE_A, SCALE_B, FACTOR, WORK, CUBLAS = (n << 16 for n in range(1, 9))
#: cudaDataType by quaver_dtype; values of cuBLAS's documentation.
TYPES = {c.BF16: 14, c.F16: 2, c.F32: 0, c.E4M3: 28, c.E5M2: 29, c.E2M1: 33}
#: cublasLtMatmulMatrixScale_t by block; None for the default, a float.
MODES = {c.TENSOR: None, c.MX: 2, c.MX_SQUARE: 2, c.NV: 1, c.NV_SQUARE: 1}


def operand(data: int, scale: int, rows: int, k: int, block: int, dtype: int) -> Matrix:
    stride = -(-k // 32) * 16 if dtype == c.E2M1 else -(-k // 16) * 16
    given = {"data": data, "scale": scale, "factor": FACTOR, "rows": rows, "columns": k, "stride": stride}
    return Matrix(**given, block=block, dtype=dtype)


def check_call(lib: Library, log: Log, block: int, dtypes: tuple[int, int, int], **options: Any) -> None:
    """Multiply [48, 100] by [64, 100] and compare the arguments of cuBLAS with its documentation."""
    m, n, k = 48, 64, 100
    a_type, b_type, y_type = dtypes
    a, b = operand(A, SCALE_A, m, k, block, a_type), operand(B, SCALE_B, n, k, block, b_type)
    y = Matrix(data=Y, rows=m, columns=n, stride=n + 16, dtype=y_type)
    given = GemmOptions(workspace=WORK, workspace_bytes=1 << 20, **options)
    assert lib.gemm(CUBLAS, given, a, b, y) == c.OK
    (call,) = log.read()
    whole = 128 if a_type == c.E2M1 else 112  # k with its padding
    attributes = {int(name): int(value, 16) for name, value in call["attributes"].items()}
    expected = {3: 1, 4: 0, 17: SCALE_B, 18: SCALE_A, 25: options.get("fast_accumulation", 0)}
    if MODES[block] is not None:
        expected |= {31: MODES[block], 32: MODES[block]}
    if "bias" in options:
        expected |= {7: 4, 8: options["bias"], 26: TYPES[c.BF16 if y_type == c.F32 else y_type]}
    if "device_alpha" in options:
        expected |= {2: 1}
    assert attributes == expected, (attributes, expected)
    # Columns first: the transpose of y is b.T.T @ a.T, with a and b in their stored layouts.
    assert call["a_layout"] == [TYPES[b_type], whole, n, whole]
    assert call["b_layout"] == [TYPES[a_type], whole, m, whole]
    assert call["y_layout"] == call["c_layout"] == [TYPES[y_type], n, m, n + 16]
    assert (call["a"], call["b"], call["c"], call["y"]) == (B, A, Y, Y)
    assert (call["handle"], call["workspace"], call["bytes"], call["algorithm"]) == (CUBLAS, WORK, 1 << 20, 42)
    assert (call["compute"], call["scale"]) == (68, 0)
    alpha = options.get("device_alpha", options.get("alpha", 1))
    assert (call["alpha"], call["beta"]) == (alpha, options.get("device_beta", options.get("beta", 0)))


def errors(lib: Library, log: Log) -> int:
    """Run wrong calls; returns their number."""
    a = operand(A, SCALE_A, 48, 96, c.TENSOR, c.E4M3)
    b = operand(B, SCALE_B, 64, 96, c.TENSOR, c.E4M3)
    wide = operand(B, SCALE_B, 64, 96, c.TENSOR, c.E5M2)
    y = Matrix(data=Y, rows=48, columns=64, stride=64)
    o = GemmOptions()
    cases = [
        (c.NULL, 0, o, a, b, y),
        (c.NULL, CUBLAS, None, a, b, y),
        (c.NULL, CUBLAS, o, None, b, y),
        (c.NULL, CUBLAS, o, a, None, y),
        (c.NULL, CUBLAS, o, a, b, None),
        (c.NULL, CUBLAS, GemmOptions(device_alpha=FACTOR), a, b, y),
        (c.NULL, CUBLAS, GemmOptions(workspace_bytes=1), a, b, y),
        (c.SIZE, CUBLAS, GemmOptions(size=0), a, b, y),
        (c.FORMAT, CUBLAS, GemmOptions(fast_accumulation=2), a, b, y),
        (c.FORMAT, CUBLAS, o, operand(A, SCALE_A, 48, 96, c.TENSOR, c.E5M2), wide, y),
        (
            c.FORMAT,
            CUBLAS,
            o,
            operand(A, SCALE_A, 48, 96, c.ROW, c.E4M3),
            operand(B, SCALE_B, 64, 96, c.ROW, c.E4M3),
            y,
        ),
        (c.FORMAT, CUBLAS, o, a, b, Matrix(data=Y, rows=48, columns=64, stride=64, dtype=c.E4M3)),
        (c.MISMATCH, CUBLAS, o, a, operand(B, SCALE_B, 64, 96, c.MX, c.E4M3), y),
        (c.MISMATCH, CUBLAS, o, a, operand(B, SCALE_B, 64, 80, c.TENSOR, c.E4M3), y),
        (c.MISMATCH, CUBLAS, o, a, b, Matrix(data=Y, rows=47, columns=64, stride=64)),
        (c.ALIGNMENT, CUBLAS, o, a, b, Matrix(data=Y + 2, rows=48, columns=64, stride=64)),
        (c.ALIGNMENT, CUBLAS, GemmOptions(bias=FACTOR + 2), a, b, y),
    ]
    for wanted, *given in cases:
        status = lib.gemm(*given)
        assert status == wanted, (lib.text(status), lib.text(wanted), given)
    for failing, code in (
        ("cublasLtMatmulDescCreate", 3),
        ("cublasLtMatrixLayoutCreate", 7),
        ("heuristic", 15),
        ("cublasLtMatmul", 13),
    ):
        os.environ["STUB_FAILS"] = failing
        assert lib.gemm(CUBLAS, o, a, b, y) == c.CUBLAS, failing
        assert lib.c.quaver_last_driver_error(lib.handle) == code
        os.environ.pop("STUB_FAILS")
    empty = operand(A, SCALE_A, 0, 96, c.TENSOR, c.E4M3)
    assert lib.gemm(CUBLAS, o, empty, b, Matrix(data=Y, columns=64, stride=64)) == c.OK
    assert log.read() == []
    return len(cases) + 5


def main() -> None:
    lib, log = Library(Path(sys.argv[1]) / "libquaver.so"), Log(Path(os.environ["STUB_GEMM_LOG"]))
    assert lib.create(WORK, 16) == c.OK
    count = 0
    for block in MODES:
        four = block in (c.NV, c.NV_SQUARE)
        for formats in [(c.E2M1, c.E2M1)] if four else [(c.E4M3, c.E4M3), (c.E5M2, c.E4M3), (c.E4M3, c.E5M2)]:
            for y_type in (c.BF16, c.F16, c.F32):
                check_call(lib, log, block, (*formats, y_type))
                check_call(lib, log, block, (*formats, y_type), bias=FACTOR, fast_accumulation=1, alpha=2, beta=0.5)
                check_call(lib, log, block, (*formats, y_type), device_alpha=FACTOR, device_beta=FACTOR + 4)
                count += 3
    count += errors(lib, log)
    assert ct.CDLL("libcublasLt.so.13").stub_alive() == 0
    print(count)


if __name__ == "__main__":
    main()
