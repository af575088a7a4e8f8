"""Rates of the GPU itself: copying, and bf16 GEMMs."""

from functools import cache

import torch

from benchmarks.gpu.measuring.clock import interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting


@cache
def copy_rate(setting: Setting) -> float:
    """Return bytes per second, read and written, of a copy far larger than the caches."""
    size = 2**16 if setting.toy else 2**31
    source = torch.empty(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    findings = Findings()
    timings = interleave({"copy": lambda: target.copy_(source)}, setting, findings)
    if findings.failures:
        raise RuntimeError(findings.failures[0])
    return 2 * size / timings["copy"].seconds


def copying(setting: Setting, findings: Findings) -> None:
    findings.add("copy on the device", "rate", copy_rate(setting) / 1e12, "TB/s")


def multiplying(setting: Setting, findings: Findings) -> None:
    sizes = [32] if setting.toy else [4096, 8192]
    for size in sizes:
        a = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
        b = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
        name = f"bf16 {size}³"
        timings = interleave({name: lambda a=a, b=b: torch.mm(a, b.t())}, setting, findings)
        for subject, timing in timings.items():
            findings.add(subject, "rate", 2 * size**3 / timing.seconds / 1e12, "TFLOP/s")


SECTION = Section(
    name="ceilings",
    title="What the card reaches",
    notes="Read and written bytes together; GEMMs of normal values.",
    seconds=15,
    cases=lambda setting: [Case("copy", copying), Case("bf16", multiplying)],
)
