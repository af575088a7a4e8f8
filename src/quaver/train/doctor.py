"""What this machine can run natively, what by emulation, and why."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import quaver
from quaver.recipes import RECIPES

# Lowest compute capability whose tensor cores take the recipe's operands.
NEEDS = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "rowwise": (8, 9),
    "rowwise_bf16_wgrad": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}

# Recipes whose GEMMs quaver hands to the hardware: bf16 is torch's own. The FP8 and FP4 kernels come later.
NATIVE = {"bf16"}

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16")


@dataclass(frozen=True)
class Device:
    """A GPU: its name and compute capability."""

    name: str
    capability: tuple[int, int]


def versions() -> dict[str, str]:
    """Version of everything that numbers could depend on; what is not installed says so."""
    shown = {"quaver": quaver.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "jax"):
        try:
            shown[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            shown[package] = "not installed"
    return shown


def cpu() -> str:
    """Architecture, threads and those instructions that make exact emulation fast."""
    found = [flag for flag in CPU_FLAGS if flag in cpu_flags()]
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {os.cpu_count()} cores, torch uses {kind}; " + (
        ", ".join(found) or "no bf16 instructions"
    )


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}


def gpus() -> list[Device]:
    return [
        Device(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    ]


def how(recipe: str, devices: Sequence[Device]) -> tuple[str, str]:
    """How a recipe runs here ("native" or "emulated") and why, in a few words."""
    if recipe in NATIVE:
        return "native", "nothing is quantized; torch's own GEMMs"
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
    return "emulated", f"{best.name} could, but this version has no native GEMM for it yet"


def recipes_table(devices: Sequence[Device]) -> list[tuple[str, str, str]]:
    """Recipe, how, why, for every recipe there is."""
    return [(name, *how(name, devices)) for name in RECIPES]


def advice(devices: Sequence[Device]) -> str:
    if not devices:
        return "Find out here whether a recipe converges (quaver compare): the bits are those of a GPU."
    return "Choose a recipe here (quaver compare): emulation is exact, though slower than bf16."
