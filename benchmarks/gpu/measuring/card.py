"""Description of the machine: GPU, driver, clocks, versions, commit, date."""

import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.measuring.machine import commit, cpu, today
from quaver.costs.hardware import GPUS, Gpu

#: Queries of nvidia-smi by displayed name.
QUERIES = {
    "driver": "driver_version",
    "power limit": "power.limit",
    "SM clock, highest": "clocks.max.sm",
    "SM clock, now": "clocks.sm",
    "memory clock": "clocks.mem",
    "temperature": "temperature.gpu",
}


def describe(given_commit: str = "") -> dict[str, str]:
    """Return the known properties by name, in the displayed order."""
    facts = {"date": today(), "card": name()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["capability"] = f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs"
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB, L2 {properties.L2_cache_size / 2**20:.0f} MiB"
    facts |= smi()
    facts |= {"cuda": torch.version.cuda or "none", "torch": torch.__version__}
    facts |= {package: installed(package) for package in ("triton", "torchao", "numpy")}
    facts |= {"python": platform.python_version(), "cpu": cpu(), "commit": given_commit or commit()}
    return facts


def name() -> str:
    """Return the name of the GPU, or "none"."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def slug(card: str) -> str:
    """Return the GPU's name as part of a file name: "NVIDIA H200" becomes "h200"."""
    words = re.findall(r"[a-z0-9]+", card.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce")) or "none"


def known() -> Gpu | None:
    """Return the ledger's row of this GPU, if there is one."""
    card = name()
    return next((gpu for gpu in GPUS.values() if card in (gpu.about, gpu.driver)), None)


def nearest() -> Gpu:
    """Return the ledger's row for counting bytes: this GPU's, or that of one with the same layouts."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return known() or GPUS["b200" if major >= 10 else "h200"]


def smi() -> Mapping[str, str]:
    """Return the output of nvidia-smi, if it is installed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = done.stdout.strip().splitlines()
    return dict(zip(QUERIES, (value.strip() for value in lines[0].split(",")), strict=False)) if lines else {}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
