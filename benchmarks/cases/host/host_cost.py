"""Host time of an eager layer on a GPU, measured on a CPU with a driver that does nothing."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from benchmarks.measuring import stub_driver
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, at_most

ROOT = Path(__file__).parents[3]
#: Maximum of the time over nn.Linear's, and the dtype with a target.
HIGHEST, JUDGED = 1.6, "bf16"
#: Baselines.
PLAIN = ("nn.Linear", *(f"{kind} of torch's parts" for kind in ("LayerNormLinear", "LayerNormMLP", "TransformerLayer")))
#: GPUs for which tensors are taken, by architecture.
GPUS = {90: "Hopper", 100: "Blackwell"}
#: When it is quick the last of them alone, in one dtype, under a recipe with a history and one of blocks, since every
#: kernel is checked and has a launcher compiled, which is then not optimized.
QUICK: dict[str, int | str] = {"rounds": 1, "steps": 5, "dtypes": "bf16", "recipes": "delayed mxfp8", "unoptimized": ""}
#: Each figure is the median over so many processes, because memory addresses change ratios by up to a tenth.
PROCESSES = 3
NOTES = (
    "Forward and backward of 16 by 16 on CPU tensors that take a GPU's way: the real layer, choice and launches, up to "
    "the driver, which is a stub; torch.mm stands for a scaled GEMM. One thread, processor time, 20 steps between 20 "
    "of torch's before and 20 after; the median of 40 such ratios, and of three fresh processes. Blocks are of layers "
    "of that size, against torch's norm, linear layers, gelu and attention. The weight is unchanged and its gradient "
    "adds up, as between micro-batches, within one step of delayed scaling. Not in it: the driver's own time, and what "
    "cuBLASLt does before it launches."
)


def measure(quick: bool) -> list[Figure]:
    """Return the ratios, with targets unless quick."""
    if stub_driver.compiler() is None:
        raise NotMeasurable("not measurable here: there is no C compiler, with which Triton makes its launchers")
    if not triton.__version__.startswith("3.6."):
        raise NotMeasurable(f"not measurable with triton {triton.__version__}: the stub is of the driver of 3.6")
    figures = []
    for arch, gpu in list(GPUS.items())[-1:] if quick else GPUS.items():
        with tempfile.TemporaryDirectory() as folder:
            options = QUICK if quick else {"rounds": 40, "steps": 20, "launchers": folder}
            processes = [run(arch, options) for _ in range(1 if quick else PROCESSES)]
        for dtype, rows in processes[0].items():
            for name in rows:
                ratio, microseconds = map(statistics.median, zip(*(one[dtype][name] for one in processes), strict=True))
                judged = dtype == JUDGED and name not in PLAIN and not quick
                figures.append(
                    Figure(f"{name}, {gpu}", f"{dtype}, ratio", ratio, "x", at_most(HIGHEST) if judged else None)
                )
                figures.append(Figure(f"{name}, {gpu}", f"{dtype}, time", microseconds, "µs"))
    return figures


def run(arch: int, options: dict[str, int | str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (ratio to torch's layers, microseconds of a step) by dtype and subject, measured in a separate process.

    Args:
        options: options of `benchmarks.host_cost`; several values are separated by spaces, and "" means none.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= stub_driver.build(Path(folder)) | {"OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.host_cost",
            *(word for name, value in {"arch": arch, **options}.items() for word in (f"--{name}", *str(value).split())),
        ]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it ended without a word")
    by_dtype: dict[str, dict[str, tuple[float, float]]] = json.loads(done.stdout.splitlines()[-1])
    return by_dtype


CASE = Case(
    name="host-cost",
    title="Host time of an eager layer on a GPU, with the driver stubbed, against nn.Linear",
    notes=NOTES,
    measure=measure,
)
