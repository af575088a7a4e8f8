"""Description of the machine: CPU, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

#: CPU features that decide how fast bf16 products are.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, str]:
    """Return properties by name, in the displayed order."""
    return {
        "date": today(),
        "cpu": cpu(),
        "cores": str(os.cpu_count()),
        "flags": " ".join(flag for flag in FLAGS if flag in flags()) or "none of " + " ".join(FLAGS),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "jax": version("jax"),
        "commit": commit(),
    }


def today() -> str:
    return datetime.date.today().isoformat()


def cpu() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def flags() -> set[str]:
    """Features as Linux names them; empty elsewhere."""
    return set(_cpuinfo("flags").split())


def commit() -> str:
    """Return the commit, marked if files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", "src", "benchmarks")
    return (head + (" with uncommitted changes" if changed else "")) if head else "unknown"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
