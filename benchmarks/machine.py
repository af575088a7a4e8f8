"""What a figure was measured on: CPU, versions, commit, date."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.timing import Step, interleave
from quaver.torch import cpu_brgemm
from quaver.torch.cpu_matmul import bf16_products

#: CPU features that decide how fast bf16 products are.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, str]:
    """Facts by name, in the order in which they are shown."""
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


def bf16_inside() -> float:
    """Time of a float32 product that may multiply in bf16 over that of a plain one: the better of the two that there
    are; about 1 where neither multiplies in bf16.

    The CPU's flags do not tell: on a Zen 4, which has AVX512-BF16, oneDNN 3.12 takes the hint and runs float32.
    """
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def hinted() -> None:
        with bf16_products():
            torch.mm(a, b)

    steps: dict[str, Step] = {"plain": lambda: torch.mm(a, b), "hinted": hinted}
    if cpu_brgemm.takes(1024, 1024, 1024):
        narrow_a, narrow_b = a.bfloat16(), b.bfloat16()
        steps["blocked"] = lambda: cpu_brgemm.product(narrow_a, narrow_b)
    timings = interleave(steps, rounds=7, steps=1)
    return min(timing.ratio for name, timing in timings.items() if name != "plain")


def commit() -> str:
    """The commit, marked where files differ from it."""
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
