"""`quaver doctor`: which recipes run natively on this machine and which by emulation, and why."""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import quaver
from quaver.recipes import RECIPES
from quaver.train.config import FRAMEWORKS
from quaver.train.frameworks import EXTRAS

# Lowest compute capability whose tensor cores support the recipe's operands. Other quantizing recipes have no GEMM in
# torch or XLA.
NEEDS = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "rowwise": (8, 9),
    "rowwise_bf16_wgrad": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}

# Sentences about the evidence for the table.
SEEN = "Each recipe was tried: forward and backward of a linear layer of 256 by 256 in bfloat16."
UNSEEN = "Nothing was tried: the table goes by the architecture alone. With PyTorch installed, each recipe is tried."

# glibc variables, in bytes: larger requests are mapped from the system, and more free memory than this is returned.
MALLOC = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


@dataclass(frozen=True)
class Device:
    """A GPU: its name and compute capability."""

    name: str
    capability: tuple[int, int]


def versions() -> dict[str, str]:
    """Return the versions of all packages that numbers may depend on, or "not installed"."""
    shown = {"quaver": quaver.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "jax", "flax"):
        try:
            shown[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            shown[package] = "not installed"
    return shown


def has(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


def frameworks() -> list[str]:
    """Return a line per framework: devices it can use here, or how to install it."""
    return [
        f"quaver train --framework {name}"
        + (f" runs on {', '.join(_kinds(name))}" if has(name) else f" needs: pip install 'quaver[{EXTRAS[name]}]'")
        for name in FRAMEWORKS
    ]


def _kinds(framework: str) -> list[str]:
    """Return the kinds of device that a framework can use."""
    if framework == "jax":
        import jax

        return sorted({device.platform for device in jax.devices()} | {"cpu"})
    return ["cpu"] + ["cuda"] * bool(gpus())


def cpu() -> str:
    """Describe the CPU: architecture, cores and the instructions that make exact emulation fast."""
    flags = [flag for flag in CPU_FLAGS if flag in cpu_flags()]
    return f"{platform.machine()}, {os.cpu_count()} cores{_torch_uses()}; {', '.join(flags) or 'no bf16 instructions'}"


def _torch_uses() -> str:
    if not has("torch"):
        return ""
    import torch

    return f", torch uses {torch.backends.cpu.get_cpu_capability()}"


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}


def gpus() -> list[Device]:
    """Return NVIDIA GPUs as torch sees them, or as jax does if torch is not installed."""
    if not has("torch"):
        return _jax_gpus()
    import torch

    return [
        Device(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    ]


def _jax_gpus() -> list[Device]:
    if not has("jax"):
        return []
    import jax

    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return [Device(gpu.device_kind, _capability(gpu.compute_capability)) for gpu in gpus]


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def implementation_text(recipe: str, devices: Sequence[Device]) -> tuple[str, str]:
    """Return how a recipe would run ("native", "emulated", "not tried") based on the GPUs' architecture, and why."""
    if not RECIPES[recipe]().quantizes:
        return "native", "nothing is quantized; the framework's own GEMMs"
    if recipe not in NEEDS:
        return "emulated", "torch and XLA have no GEMM for its formats"
    needed = NEEDS[recipe]
    sm = f"sm_{needed[0]}{needed[1]}"
    if not devices:
        return "emulated", f"no GPU; native GEMMs need {sm} or newer"
    best = max(devices, key=lambda device: device.capability)
    if best.capability < needed:
        return (
            "emulated",
            f"{best.name} is sm_{best.capability[0]}{best.capability[1]}; native GEMMs need {sm} or newer",
        )
    return "not tried", f"{best.name} could: it is sm_{best.capability[0]}{best.capability[1]}"


def kernels_text(recipe: str, devices: Sequence[Device]) -> tuple[str, str]:
    """Run a small PyTorch layer under a recipe; returns how it ran and why."""
    from quaver.train.torch.learner import run_trial

    try:
        ran = run_trial(RECIPES[recipe]())
    except (RuntimeError, ValueError) as error:
        return "fails", str(error).splitlines()[0][:200]
    native = [name for name, implementation, _ in ran if implementation in ("native", "torch")]
    if len(native) == len(ran):
        return "native", "all three GEMMs are the GPU's" if RECIPES[recipe]().quantizes else implementation_text(
            recipe, devices
        )[1]
    if not devices:
        return "emulated", implementation_text(recipe, devices)[1]
    emulated: dict[str, list[str]] = {}
    for name, implementation, why in ran:
        if name not in native:
            emulated.setdefault(f"{implementation}: {why}", []).append(name)
    parts = [f"{', '.join(native)} native"] if native else []
    parts += [f"{', '.join(names)} {how_and_why}" for how_and_why, names in emulated.items()]
    return "partly native" if native else "emulated", "; ".join(parts)


def recipes_table(devices: Sequence[Device]) -> list[tuple[str, str, str]]:
    """Return (recipe, how, why) for every recipe: as tried, or without PyTorch based on the GPUs' architecture."""
    look = kernels_text if has("torch") else implementation_text
    return [(name, *look(name, devices)) for name in RECIPES]


def memory(devices: Sequence[Device]) -> str:
    """Return advice on glibc variables that avoid page faults for large CPU tensors, or ""."""
    if devices or not has("torch") or platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return ""
    unset = [name for name in MALLOC if not os.environ.get(name)]
    if not unset:
        return ""
    both = " ".join(f"{name}={1 << 30}" for name in MALLOC)
    alone = f"{unset[0]} is not set, and the other one alone ends the threshold that grows by itself; s"
    return (
        "Large tensors on a CPU come from the system page by page, anew in each step. "
        f"{alone if len(unset) == 1 else 'S'}et both and the process holds its memory instead: {both}"
    )


def advice(devices: Sequence[Device]) -> str:
    if not devices:
        return "Find out here whether a recipe converges (quaver compare): the codes are those that the formats define."
    return "Choose a recipe here (quaver compare): emulation is exact, though slower than bf16."
