"""The C library as ctypes sees it, and the tools that build it; needs neither torch nor Triton."""

import ctypes as ct
import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STUB = Path(__file__).parent / "stub"
#: Compilers of C that are here.
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
WARNINGS = "-Wall", "-Wextra", "-Wconversion", "-Werror"

# quaver_dtype, quaver_block and quaver_status of the header
BF16, F16, F32, E4M3, E5M2, E2M1 = range(6)
NONE, TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, MX, MX_SQUARE, NV, NV_SQUARE = range(9)
(
    OK,
    NULL,
    SIZE,
    FORMAT,
    SHAPE,
    ALIGNMENT,
    MISMATCH,
    WORKSPACE,
    DRIVER,
    NO_DRIVER,
    ARCHITECTURE,
    NOT_EXPORTED,
    MEMORY,
    NO_CUBLAS,
    CUBLAS,
) = range(15)


class Matrix(ct.Structure):
    """quaver_tensor."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("dtype", ct.c_int32),
        ("block", ct.c_int32),
        ("reserved", ct.c_int32),
        ("rows", ct.c_int64),
        ("columns", ct.c_int64),
        ("stride", ct.c_int64),
        ("data", ct.c_void_p),
        ("scale", ct.c_void_p),
        ("factor", ct.c_void_p),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(Matrix), **values})


class Options(ct.Structure):
    """quaver_options."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("power_of_two", ct.c_int32),
        ("stochastic", ct.c_int32),
        ("hadamard", ct.c_int32),
        ("seed", ct.c_uint64),
        ("tensor_id", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("count", ct.c_void_p),
        ("factor", ct.c_void_p),
        ("newest", ct.c_void_p),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(Options), "power_of_two": 1, **values})


class GemmOptions(ct.Structure):
    """quaver_gemm_options."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("fast_accumulation", ct.c_int32),
        ("alpha", ct.c_float),
        ("beta", ct.c_float),
        ("device_alpha", ct.c_void_p),
        ("device_beta", ct.c_void_p),
        ("bias", ct.c_void_p),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_int64),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(GemmOptions), "alpha": 1, **values})


class NormOptions(ct.Structure):
    """quaver_norm_options."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("centred", ct.c_int32),
        ("eps", ct.c_float),
        ("reserved", ct.c_uint32),
        ("gamma", ct.c_void_p),
        ("beta", ct.c_void_p),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(NormOptions), "eps": 1e-6, **values})


class RopeOptions(ct.Structure):
    """quaver_rope_options."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("dtype", ct.c_int32),
        ("interleaved", ct.c_int32),
        ("back", ct.c_int32),
        ("outer", ct.c_int64),
        ("inner", ct.c_int64),
        ("heads", ct.c_int32),
        ("k_heads", ct.c_int32),
        ("dim", ct.c_int32),
        ("reserved", ct.c_int32),
        ("q_strides", ct.c_int64 * 3),
        ("k_strides", ct.c_int64 * 3),
        ("table_strides", ct.c_int64 * 2),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(RopeOptions), **values})


class Loss(ct.Structure):
    """quaver_loss."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("gradient", ct.c_int32),
        ("ignore_index", ct.c_int32),
        ("label_smoothing", ct.c_float),
        ("z_loss", ct.c_float),
        ("soft_cap", ct.c_float),
        ("weights", ct.c_void_p),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(Loss), **values})


class History(ct.Structure):
    """quaver_history."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("layers", ct.c_int32),
        ("length", ct.c_int32),
        ("step", ct.c_int32),
        ("column_step", ct.c_int32),
        ("margin", ct.c_int32),
        ("most_recent", ct.c_int32),
        ("power_of_two", ct.c_int32),
        ("dtypes", ct.c_int32 * 3),
        ("reserved", ct.c_uint32),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(History), **values})


class Step(ct.Structure):
    """quaver_step."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("weight", ct.c_int32),
        ("gradient", ct.c_int32),
        ("moments", ct.c_int32),
        ("even", ct.c_int32),
        ("factored", ct.c_int32),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(Step), **values})


class Parameter(ct.Structure):
    """quaver_parameter."""

    _fields_ = [
        ("size", ct.c_uint32),
        ("number", ct.c_int32),
        *((name, ct.c_int64) for name in ("rows", "columns", "offset")),
        ("seed", ct.c_uint64),
        *((name, ct.c_void_p) for name in ("weight", "low", "first", "first_scale", "second", "second_scale")),
        *((name, ct.c_void_p) for name in ("gradient", "factor", "count")),
    ]

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"size": ct.sizeof(Parameter), **values})


def build_stub(folder: Path) -> Path:
    """Compile the stub driver and cublasLt; returns the folder of libcuda.so.1 and libcublasLt.so.13."""
    folder.mkdir(exist_ok=True)
    for source, name in (("cuda.c", "libcuda.so.1"), ("cublaslt.c", "libcublasLt.so.13")):
        options = "-std=gnu11", "-O2", *WARNINGS, "-shared", "-fPIC", f"-Wl,-soname,{name}"
        run(COMPILERS[0], *options, STUB / source, "-o", folder / name, "-lpthread")
    return folder


def build(folder: Path, compiler: str, name: str = "libquaver.so", *options: str) -> Path:
    """Compile an exported library in its folder."""
    sources = [path.name for path in sorted(folder.glob("*.[cS]"))]
    flags = "-std=gnu11", "-O2", *WARNINGS, "-fPIC", "-shared", "-fvisibility=hidden"
    run(compiler, *flags, *options, *sources, "-o", name, "-ldl", "-lpthread", cwd=folder)
    return folder / name


def run(*command: Any, **options: Any) -> str:
    """Run a command; returns its output."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(stub: Path, log: Path | None = None, **more: str) -> dict[str, str]:
    """Return the environment of a process that finds the stub driver."""
    paths = [str(stub), os.environ.get("LD_LIBRARY_PATH", "")]
    found = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths)), "TRITON_LIBCUDA_PATH": str(stub), **more}
    return found if log is None else {**found, "STUB_LOG": str(log)}


class Library:
    """libquaver.so with the types of its functions."""

    def __init__(self, path: Path) -> None:
        self.c = ct.CDLL(str(path))
        names = "quaver_row_bytes", "quaver_scale_bytes", "quaver_workspace_bytes", "quaver_norm_partial_bytes"
        for name in (*names, "quaver_step_programs"):
            getattr(self.c, name).restype = ct.c_int64
        self.c.quaver_row_bytes.argtypes = [ct.c_int64, ct.c_int]
        self.c.quaver_scale_bytes.argtypes = [ct.c_int64, ct.c_int64, ct.c_int]
        self.c.quaver_step_programs.argtypes = [ct.c_int64, ct.c_int64]
        self.c.quaver_workspace_bytes.argtypes = [ct.c_int64]
        self.c.quaver_norm_partial_bytes.argtypes = [ct.c_void_p, ct.c_int64, ct.c_int64, ct.c_int32]
        for name in ("quaver_status_text", "quaver_build"):
            getattr(self.c, name).restype = ct.c_char_p
        self.handle = ct.c_void_p()

    def create(self, workspace: int, size: int) -> int:
        status: int = self.c.quaver_create(ct.byref(self.handle), ct.c_void_p(workspace), ct.c_int64(size))
        return status

    def amax(self, x: Matrix | None, amax: int) -> int:
        status: int = self.c.quaver_amax(self.handle, None, _reference(x), ct.c_void_p(amax))
        return status

    def quantize(
        self,
        x: Matrix | None,
        q: Matrix | None,
        qt: Matrix | None = None,
        amax: int = 0,
        options: Options | None = None,
    ) -> int:
        pointers = map(_reference, (x, q, qt))
        status: int = self.c.quaver_quantize(self.handle, None, *pointers, ct.c_void_p(amax), _reference(options))
        return status

    def dequantize(self, q: Matrix | None, y: Matrix | None, power_of_two: int = 1) -> int:
        status: int = self.c.quaver_dequantize(self.handle, None, _reference(q), _reference(y), power_of_two)
        return status

    def gemm(self, cublaslt: int, options: GemmOptions | None, *matrices: Matrix | None) -> int:
        """matrices: a, b, y."""
        pointers = _reference(options), *map(_reference, matrices)
        status: int = self.c.quaver_gemm(self.handle, ct.c_void_p(cublaslt), None, *pointers)
        return status

    def roll(self, history: History | None, table: int, factors: int) -> int:
        pointers = ct.c_void_p(table), ct.c_void_p(factors)
        status: int = self.c.quaver_roll(self.handle, None, _reference(history), *pointers)
        return status

    def activate(self, kind: int, gate: Matrix | None, value: Matrix | None, y: Matrix | None, *limits: float) -> int:
        pointers = map(_reference, (gate, value, y))
        status: int = self.c.quaver_activate(self.handle, None, kind, *pointers, *map(ct.c_float, limits or (0, 0)))
        return status

    def activate_quantize(
        self,
        kind: int,
        quantize: Options | None,
        *matrices: Matrix | None,
        amax: int = 0,
        limits: Sequence[float] = (0, 0),
    ) -> int:
        """matrices: gate, value, q, qt."""
        pointers = _reference(quantize), *map(_reference, matrices), ct.c_void_p(amax)
        status: int = self.c.quaver_activate_quantize(self.handle, None, kind, *pointers, *map(ct.c_float, limits))
        return status

    def activate_backward(self, kind: int, *matrices: Matrix | None, limits: Sequence[float] = (0, 0)) -> int:
        """matrices: grad, gate, value, of_gate, of_value."""
        pointers = map(_reference, matrices)
        status: int = self.c.quaver_activate_backward(self.handle, None, kind, *pointers, *map(ct.c_float, limits))
        return status

    def norm(self, options: NormOptions | None, x: Matrix | None, y: Matrix | None, mean: int, inverse: int) -> int:
        pointers = *map(_reference, (options, x, y)), ct.c_void_p(mean), ct.c_void_p(inverse)
        status: int = self.c.quaver_norm(self.handle, None, *pointers)
        return status

    def norm_quantize(
        self, options: NormOptions | None, quantize: Options | None, x: Matrix | None, q: Matrix | None, *addresses: int
    ) -> int:
        """addresses: amax, mean, inverse."""
        pointers = *map(_reference, (options, quantize, x, q)), *map(ct.c_void_p, addresses)
        status: int = self.c.quaver_norm_quantize(self.handle, None, *pointers)
        return status

    def norm_backward(
        self, options: NormOptions | None, matrices: Sequence[Matrix | None], addresses: Sequence[int]
    ) -> int:
        """matrices: grad, x, dx. addresses: mean, inverse, of_gamma, of_beta, partial."""
        grad, x, dx = map(_reference, matrices)
        mean, inverse, *others = map(ct.c_void_p, addresses)
        pointers = grad, x, mean, inverse, dx, *others
        status: int = self.c.quaver_norm_backward(self.handle, None, _reference(options), *pointers)
        return status

    def rope(self, options: RopeOptions | None, *addresses: int) -> int:
        """addresses: q, k, q_out, k_out, cos, sin."""
        pointers = map(ct.c_void_p, addresses)
        status: int = self.c.quaver_rope(self.handle, None, _reference(options), *pointers)
        return status

    def cross_entropy(self, options: Loss | None, logits: Matrix | None, targets: int, losses: int) -> int:
        pointers = _reference(options), _reference(logits), ct.c_void_p(targets), ct.c_void_p(losses)
        status: int = self.c.quaver_cross_entropy(self.handle, None, *pointers)
        return status

    def step_row(self, step: Step | None, parameter: Parameter | None, index: int, row: Any, chunks: Any) -> int:
        pointers = map(_reference, (step, parameter))
        status: int = self.c.quaver_step_row(*pointers, ct.c_int32(index), row, chunks)
        return status

    def adamw_step(self, step: Step | None, programs: int, parameters: int, *addresses: int) -> int:
        """addresses: chunks, table, scalars, workspace."""
        chunks, *others = map(ct.c_void_p, addresses)
        given = chunks, ct.c_int64(programs), *others, ct.c_int32(parameters)
        status: int = self.c.quaver_adamw_step(self.handle, None, _reference(step), *given)
        return status

    def text(self, status: int) -> str:
        text: bytes = self.c.quaver_status_text(status)
        return text.decode()


def _reference(struct: ct.Structure | None) -> Any:
    return None if struct is None else ct.byref(struct)


class Log:
    """The calls that the stub driver has logged since the last query."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path, self.at = path, path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        with self.path.open() as file:
            file.seek(self.at)
            text = file.read()
            self.at = file.tell()
        return [json.loads(line) for line in text.splitlines()]


def exported(folder: Path, arch: int = 90) -> dict[int, list[dict[str, Any]]]:
    """Return the exported variants by the checksum that the stub logs for their image."""
    images = (folder / f"quaver_sm{arch}.bin").read_bytes()
    found: dict[int, list[dict[str, Any]]] = {}
    for variant in json.loads((folder / f"quaver_sm{arch}.json").read_text()):
        at, size = variant["offset"], variant["bytes"]
        found.setdefault(zlib.crc32(images[at : at + size]), []).append(variant)
    return found
