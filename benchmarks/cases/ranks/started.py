"""Cases that two ranks measure, which are started here, one thread each."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measuring.figure import Case, Figure, Target, at_most

ROOT = Path(__file__).parents[3]
RANKS = 2
#: Seconds that a case takes at most.
LONGEST = 900
#: Maximum time of a step with weights gathered as codes, over the same recipe gathered in bf16.
SLOWEST = 1.3
#: Maximum bytes of weights in % of bf16's: for one scale per tensor or blocks of 128; others; four bits.
FEW_SCALES, SCALES, FOUR_BITS = 50.5, 52.0, 27.0
GATHERED = {
    **dict.fromkeys(("tensorwise", "delayed", "blockwise"), FEW_SCALES),
    **dict.fromkeys(("mxfp4", "nvfp4"), FOUR_BITS),
}
#: And the gradients' that are summed in eight bits.
REDUCED = 52.0
NOTES = (
    "Two ranks over gloo on this machine, a thread each, hold both models and take a step of each by turns; a time is "
    "the clock's between two barriers, of the rank that took longest, and a ratio the median of nine rounds' ratios. "
    "gloo's copies are part of it; no network is. The processor's ratio counts a rank's threads, gloo's too. "
)


def run(case: str, quick: bool) -> list[dict[str, Any]]:
    """Run a case's ranks and return what they measured. Raises: RuntimeError with the last line of their output."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        words = [str(RANKS), meeting, "quick" if quick else "full"]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cases.ranks.measured", case, str(rank), *words],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        try:
            printed = [each.communicate(timeout=LONGEST) for each in started]
        finally:
            for each in started:
                if each.poll() is None:
                    each.terminate()
    if any(each.returncode for each in started):
        lines = b"".join(text for _, text in printed).decode().strip().splitlines()
        raise RuntimeError(lines[-1] if lines else "it ended without a word")
    rows: list[dict[str, Any]] = json.loads(printed[0][0].decode().splitlines()[-1])
    return rows


def common(row: dict[str, Any], quick: bool, most: float | None) -> Iterator[Figure]:
    """Yield the time of a step over that of the other model."""
    judged = None if quick or most is None else at_most(most)
    yield Figure(row["recipe"], "time, ratio", row["clock"], "x", judged)
    yield Figure(row["recipe"], "processor, ratio", row["processor"], "x")
    yield Figure(row["recipe"], "step", row["narrow"]["seconds"] * 1e3, "ms")


def share(row: dict[str, Any], kind: str, target: Target | None) -> Figure:
    """Return the bytes of a kind over the other model's."""
    percent = 100 * row["narrow"]["bytes"][kind] / row["wide"]["bytes"][kind]
    return Figure(row["recipe"], f"{kind}, bytes", percent, "%", target)


def sizes(row: dict[str, Any]) -> Iterator[Figure]:
    """Yield the bytes that a rank sends in a step, by kind."""
    for kind, size in row["narrow"]["bytes"].items():
        yield Figure(row["recipe"], f"{kind}, sent", size / 2**20, "MiB")


def fsdp(quick: bool) -> Iterator[Figure]:
    for row in run("fsdp", quick):
        yield from common(row, quick, SLOWEST)
        yield Figure(row["recipe"], "over bf16's", row["narrow"]["seconds"] / row["bf16"]["seconds"], "x")
        yield share(row, "weights", None if quick else at_most(GATHERED.get(row["recipe"], SCALES)))
        yield from sizes(row)


def gradients(quick: bool) -> Iterator[Figure]:
    for row in run("gradients", quick):
        yield from common(row, quick, None)
        yield share(row, "gradients", None if quick else at_most(REDUCED))
        yield from sizes(row)


def tensor(quick: bool) -> Iterator[Figure]:
    for row in run("tensor", quick):
        yield from common(row, quick, None)
        yield share(row, "activations", None)
        yield from sizes(row)


FSDP = Case(
    name="ranks-fsdp",
    title="A step under fully_shard with weights gathered as codes, over the same recipe gathered in bf16",
    notes=NOTES
    + "Two Transformer layers of 512 features and 1408 (SwiGLU, two heads on one of keys), 256 tokens a rank, AdamW; "
    "computed in bf16, gradients reduced in float32. Over bf16's: over the unconverted model's step. Norms are "
    "gathered in bf16 in both.",
    measure=fsdp,
)
GRADIENTS = Case(
    name="ranks-gradients",
    title="Gradients in eight bits under fully_shard, over gradients reduced in bf16",
    notes=NOTES + "The model of ranks-fsdp; weights are gathered as codes in both, but for bf16.",
    measure=gradients,
)
TENSOR = Case(
    name="ranks-tensor",
    title="A step of an MLP by Column and Row, over the same in bf16",
    notes=NOTES + "512 features and 2816, GELU, 256 tokens a rank, which are gathered; sums travel in float32.",
    measure=tensor,
)
