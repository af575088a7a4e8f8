"""The table of grouped layers in docs/performance.md, from recorded launches: `python -m benchmarks ledger --moe`.

A stand-in GPU trains the layer, and what it launches is counted. A GEMM takes its FLOPs over the rate of its kind;
other launches take their bytes over the copy rate, and `ledger.LAUNCH` each.
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
BEGIN, END = "<!-- experts -->", "<!-- end of experts -->"
#: Kinds of `experts.rate` by the operands of a GEMM of torch.
KINDS = {"bfloat16 by bfloat16": "bf16", "float4_e2m1fn_x2 by float4_e2m1fn_x2": "nvfp4"}


def recorded(gpu: str) -> dict[str, Any]:
    """Return what a training step launches on a GPU, by recipe."""
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


def milliseconds(counted: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the predicted time of a recorded step."""
    _, tokens, k, n = traffic.SHAPE
    gemms = sum(2.0 * tokens * k * n / (experts.rate(kind(one, gpu), gpu) * 1e12) for one in counted["gemms"])
    launches = counted["kernels"] + counted["operations"] + len(counted["gemms"])
    return 1e3 * (gemms + counted["bytes"] / (gpu.copy.value * 1e12) + launches * ledger.LAUNCH)


def lines(gpu: str) -> list[list[str]]:
    """Return the rows of the table for a GPU."""
    counts, card = recorded(gpu), GPUS[gpu]
    base, rows = milliseconds(counts["bf16"], card), []
    for name, counted in counts.items():
        took, kinds = milliseconds(counted, card), [kind(one, card) for one in counted["gemms"]]
        shown = kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)
        launches, gigabytes = str(counted["kernels"] + counted["operations"]), f"{counted['bytes'] / 1e9:.1f}"
        rows.append([gpu, name, launches, gigabytes, shown, f"{took:.1f}", f"{base / took:.2f}"])
    return rows


def table() -> str:
    head = ["GPU", "recipe", "launches", "GB", "GEMMs", "ms", "over bf16"]
    return markdown(head, [row for gpu in CARDS for row in lines(gpu)])


def write() -> str:
    """Write the table into the page, and return it."""
    text, written = PAGE.read_text(encoding="utf-8"), table()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{written}\n{END}{after}", encoding="utf-8")
    return written
