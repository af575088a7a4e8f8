"""A CUDA driver that does nothing, for counting what a launch costs the host on a machine without a GPU.

Triton's own launcher is compiled against it and calls it as it would the real one: everything up to the driver's
doorstep is what runs on a GPU. A real driver's own time, some two microseconds a launch, is not in it.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = """
typedef int CUresult;
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return 0; }
CUresult cuLaunchKernelEx(const void *config, void *f, void **parameters, void **extra) { return 0; }
CUresult cuFuncSetAttribute(void *f, int attribute, int value) { return 0; }
CUresult cuPointerGetAttribute(void *data, int attribute, unsigned long long p) {
    *(unsigned long long *)data = p;
    return 0;
}
CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
CUresult cuDevicePrimaryCtxRelease(int device) { return 0; }
CUresult cuCtxGetLimit(void *value, int limit) { return 0; }
CUresult cuCtxSetLimit(int limit, unsigned long value) { return 0; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 132; return 0; }
CUresult cuFuncGetAttribute(int *value, int attribute, void *f) { *value = 1; return 0; }
CUresult cuFuncSetCacheConfig(void *f, int config) { return 0; }
CUresult cuModuleGetFunction(void **f, void *module, const char *name) { *f = (void *)1; return 0; }
CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuPointerGetAttributes(unsigned number, int *attributes, void **data, unsigned long long p) {
    for (unsigned at = 0; at < number; at++)
        *(unsigned long long *)data[at] = p;
    return 0;
}
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
"""
#: Functions of Triton's C module that launch any kernel, from 3.7 on; before, each kernel has its own launcher.
LAUNCHES = ("launch", "build_signature_metadata")


def compiler() -> str | None:
    """Return the C compiler that Triton would use."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> dict[str, str]:
    """Compile the stub into a folder; returns the environment of a process that uses it."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(SOURCE)
    command = [compiler() or "cc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", source, "-o", library]
    subprocess.run(command, check=True, capture_output=True)
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": ":".join(p for p in paths if p)}


def make_no_code(cache: Path) -> None:
    """Make Triton check each kernel, which takes an eighth of the time, but not compile it, because none runs.

    Args:
        cache: a separate folder, so that no real GPU gets an empty kernel from the cache.
    """
    from triton import knobs

    knobs.cache.dir = str(cache)
    knobs.runtime.add_stages_inspection_hook = _check_alone


def _check_alone(backend: Any, stages: dict[str, Any], *_: Any) -> None:
    first, check = next(iter(stages.items()))
    stages.clear()
    stages[first] = check
    stages[backend.binary_ext] = _empty


def _empty(module: Any, metadata: dict[str, Any]) -> bytes:
    """Return empty code, and set the metadata that a launcher queries."""
    metadata["name"] = "kernel"
    metadata["tensordesc_meta"] = []
    metadata["tmem_size"] = None
    for buffer in ("shared", "global_scratch_size", "profile_scratch_size"):
        metadata[buffer] = 0
    for buffer in ("global_scratch_align", "profile_scratch_align"):
        metadata[buffer] = 1
    return b""


def make_launchers_quickly() -> None:
    """Compile Triton's launchers without optimization, which takes two thirds of the time; nobody times them."""
    from triton import knobs

    knobs.build.impl = _unoptimized


def _unoptimized(
    name: str, source: str, folder: str, libraries: list[str], headers: list[str], names: list[str]
) -> str:
    target = Path(folder, name + sysconfig.get_config_var("EXT_SUFFIX"))
    paths = [*(f"-L{path}" for path in libraries), *(f"-I{path}" for path in headers if path)]
    own = [f"-I{folder}", f"-I{sysconfig.get_paths()['include']}"]
    link = [f"-l:{each}" if ".so" in each else f"-l{each}" for each in names]
    command = [compiler() or "cc", source, "-O0", "-shared", "-fPIC", "-o", target, *link, *paths, *own]
    subprocess.run(command, check=True, capture_output=True)
    return str(target)


class Driver:
    """Triton driver of an absent GPU."""

    def __init__(self, arch: int = 90) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.launcher_cls = CudaLauncher
        self.utils = _Utils(CudaUtils())
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


class _Utils:
    def __init__(self, own: Any) -> None:
        for name in LAUNCHES:
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    @staticmethod
    def load_binary(name: str, code: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        # module, function, registers, spills, threads of a program at most
        return 1, 1, 32, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None: ...
