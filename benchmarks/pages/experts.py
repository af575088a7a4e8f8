"""The tables of experts in docs/performance.md, from recorded launches: `python -m benchmarks ledger --moe`.

A stand-in GPU trains a grouped layer and the experts of a mixture, and its launches are counted. The predicted time of
a GEMM is its FLOPs over the rate of its kind; that of another launch is its bytes over the copy rate. Each launch adds
`ledger.LAUNCH`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.ahead import building, traffic
from benchmarks.pages.performance import PAGE, markdown
from quaver.costs import experts, ledger
from quaver.costs.hardware import GPUS, Gpu

#: Architectures by GPU.
CARDS = {"h200": 90, "b200": 100}
#: Markers of the table of each module.
MARKERS = {
    "layer": ("<!-- experts -->", "<!-- end of experts -->"),
    "experts": ("<!-- experts with their permutation -->", "<!-- end of experts with their permutation -->"),
}
#: Multiply-adds of each GEMM of a step, in order, as multiples of those of the layer's GEMMs: gate and up are one
#: matrix of twice the width.
GEMMS = {"layer": (1, 1, 1), "experts": (2, 1, 1, 1, 2, 2)}
#: Kinds of `experts.rate` by the operands of a GEMM of torch.
KINDS = {"bfloat16 by bfloat16": "bf16", "float4_e2m1fn_x2 by float4_e2m1fn_x2": "nvfp4"}


def recorded(gpu: str) -> dict[str, Any]:
    """Return what a training step launches on a GPU, by module and recipe."""
    with tempfile.TemporaryDirectory() as folder, building.environment(Path(folder), compilers=True) as environment:
        command = [sys.executable, "-m", "benchmarks.gpu.ahead.traffic", str(CARDS[gpu])]
        done = subprocess.run(command, cwd=building.ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"recording for {gpu} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


def kind(operands: str, gpu: Gpu) -> str:
    """Return the kind of a recorded GEMM, as `experts.rate` takes it."""
    if operands.startswith("fp8"):
        return "codes"
    return KINDS.get(operands) or ("row" if gpu.capability[0] == 9 else "mx")


def milliseconds(module: str, counted: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the predicted time of a recorded step of a module."""
    _, tokens, k, n = traffic.SHAPE
    products = zip(counted["gemms"], GEMMS[module], strict=True)
    gemms = sum(2.0 * tokens * k * n * size / (experts.rate(kind(one, gpu), gpu) * 1e12) for one, size in products)
    launches = counted["kernels"] + counted["operations"] + len(counted["gemms"])
    return 1e3 * (gemms + counted["bytes"] / (gpu.copy.value * 1e12) + launches * ledger.LAUNCH)


def lines(gpu: str, module: str, counts: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a module's table for a GPU, from what its step launches by recipe."""
    card = GPUS[gpu]
    base, rows = milliseconds(module, counts["bf16"], card), []
    for name, counted in counts.items():
        took, kinds = milliseconds(module, counted, card), [kind(one, card) for one in counted["gemms"]]
        shown = kinds[0] if len(set(kinds)) == 1 else ", ".join(dict.fromkeys(kinds))
        launches, gigabytes = str(counted["kernels"] + counted["operations"]), f"{counted['bytes'] / 1e9:.1f}"
        rows.append([gpu, name, launches, gigabytes, shown, f"{took:.1f}", f"{base / took:.2f}"])
    return rows


def write() -> str:
    """Write the tables into the page, and return them."""
    text, head = PAGE.read_text(encoding="utf-8"), ["GPU", "recipe", "launches", "GB", "GEMMs", "ms", "over bf16"]
    counts, tables = {gpu: recorded(gpu) for gpu in CARDS}, []
    for module, (begin, end) in MARKERS.items():
        tables.append(markdown(head, [row for gpu in CARDS for row in lines(gpu, module, counts[gpu][module])]))
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{tables[-1]}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")
    return "\n\n".join(tables)
