"""Properties of a device that decide which implementation runs, and the reasons why one does not."""

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Oldest compute capability (times ten) that runs the kernels, and oldest that has FP8 GEMMs.
KERNELS, FP8_GEMMS = 80, 89


class DeviceTraits(NamedTuple):
    """Properties of an architecture that do not follow from its age."""

    #: KiB of shared memory that a program may use.
    shared: int
    #: True if tensor cores multiply for four warps at once (Hopper's wgmma, Blackwell's tcgen05).
    groups: bool = False


#: All architectures of CUDA from Turing on. CUDA 12 called 110 by the number 101. 88, new in CUDA 13 (PTX ISA 9.0),
#: gets the smallest values until its own are known. Source: NVIDIA, CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability"; PTX ISA, wgmma and tcgen05.
TRAITS = {
    75: DeviceTraits(64),
    80: DeviceTraits(163),
    86: DeviceTraits(99),
    87: DeviceTraits(163),
    88: DeviceTraits(99),
    89: DeviceTraits(99),
    90: DeviceTraits(227, groups=True),
    100: DeviceTraits(227, groups=True),
    101: DeviceTraits(227, groups=True),
    103: DeviceTraits(227, groups=True),
    110: DeviceTraits(227, groups=True),
    120: DeviceTraits(99),
    121: DeviceTraits(99),
}
#: Traits of unknown architectures; tiles for it run on every GPU from Ampere on.
LEAST = DeviceTraits(99)
#: First and last Triton version that the kernels are tested with.
TRITON = (3, 6), (3, 9)
#: Implementations requested by `quaver.torch.only`: they also run on a CPU when named, and never otherwise.
forced_implementations: set[str] = set()
#: Architectures that launches are recorded for, innermost last: see `quaver.torch.backends.gpu.launch.recording`.
recorded: list[int | None] = [None]
#: Caches of launches and plans, registered at import; a recording starts and ends with empty ones. If two threads fill
#: the same entry, either may win.
tables: list[dict[Any, Any]] = []


@contextmanager
def asking(name: str) -> Iterator[None]:
    """Let a GPU implementation that was requested by name accept CPU tensors while the context is open."""
    added = {name} & {"triton", "native", "decoded"} - forced_implementations
    forced_implementations.update(added)
    try:
        yield
    finally:
        forced_implementations.difference_update(added)


def architecture(device: torch.device) -> int:
    """Return the compute capability times ten (80, 86, 89, ...), or that of the recording; 90 without a GPU."""
    arch = recorded[-1]
    return _architecture(device) if arch is None else arch


def traits(device: torch.device) -> DeviceTraits:
    """Return the traits of a device's architecture, or `LEAST`."""
    return TRAITS.get(architecture(device), LEAST)


def recorded_arch() -> int | None:
    """Return the architecture that launches are recorded for, or None."""
    return recorded[-1]


@cache
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def refusal(error: Exception, device: torch.device) -> str:
    """Return the first line of the error that a probe raised.

    Raises:
        RuntimeError: the CUDA context of the device is lost, so that every later call would fail.
    """
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as lost:
            raise RuntimeError(
                f"a probe of a GEMM lost the CUDA context of {device} ({why}): start the process again, and run "
                "it within quaver.torch.only('decoded'), which tries no native GEMM"
            ) from lost
    return why


def why_no_fp8(device: torch.device, what: str) -> str:
    """Return why FP8 GEMMs of the named implementation do not run on a device, or ""."""
    return _reason_not_on_gpu(device, what) or _why_no_fp8(architecture(device))


def _reason_not_on_gpu(device: torch.device, what: str) -> str:
    """Return why a device is no GPU, or ""; a CPU counts as one if the implementation was requested by name."""
    passes = device.type == "cuda" or (device.type == "cpu" and what in forced_implementations)
    return "" if passes else "the tensor is not on a GPU"


@cache
def _why_no_fp8(arch: int) -> str:
    if torch.version.hip is not None:
        return "this is ROCm; the kernels and FP8 GEMMs need an NVIDIA GPU"
    if arch < FP8_GEMMS:
        return f"compute capability {_capability(arch)} has no FP8 GEMMs, which need 8.9 (Ada), 9.0 (Hopper) or newer"
    return ""


@cache
def _why_too_old(arch: int) -> str:
    """Return why the kernels do not run on this architecture, or ""."""
    if torch.version.hip is not None:
        return _why_no_fp8(arch)
    if arch < KERNELS:
        return (
            f"compute capability {_capability(arch)} is below 8.0 (Ampere), which the kernels need; the same numbers "
            "are computed by plain torch operations"
        )
    return ""


def why_no_kernels(device: torch.device) -> str:
    """Return why the Triton kernels do not run on a device, or ""."""
    if recorded[-1] is not None:
        return ""
    why = _reason_not_on_gpu(device, "triton") or _why_too_old(architecture(device)) or why_no_triton()
    if not why and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton interprets kernels where TRITON_INTERPRET=1 is set before it is imported"
    return why


@cache
def why_no_triton() -> str:
    """Return why Triton is missing or too old, or ""; warns if it is newer than tested."""
    if importlib.util.find_spec("triton") is None:
        how = "pip install triton-windows" if sys.platform == "win32" else "pip install triton"
        return f"Triton is not installed ({how})"
    import triton

    version = _version(triton.__version__)
    if version < TRITON[0]:
        return f"triton {triton.__version__} is older than {_dotted(TRITON[0])}, the first that the kernels work with"
    if version > TRITON[1]:
        warnings.warn(
            f"triton {triton.__version__} is newer than {_dotted(TRITON[1])}, the last tested version; "
            "quaver.torch.only('reference') does not depend on it",
            stacklevel=2,
        )
    return ""


def _version(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _capability(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


def name(device: torch.device) -> str:
    """Return the name of a device for messages."""
    if device.type != "cuda":
        return str(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{architecture(device)})"


def out_of_memory(x: Tensor, copies: int) -> torch.OutOfMemoryError:
    """Return the error for a quantization that runs out of memory."""
    size = copies * x.numel() / 2**20
    return torch.OutOfMemoryError(
        f"no memory for the quantized copy of a {x.dtype} tensor of shape {tuple(x.shape)}, {size:.0f} MiB. "
        "Nothing was recorded: the step can be run again with a smaller batch, under quaver.torch.checkpoint, or after "
        "torch.cuda.empty_cache()"
    )
