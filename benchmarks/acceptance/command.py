"""`python -m benchmarks accept` and its variants: train the runs of a plan, paired by seed, and judge the differences.

Each run is a process with one thread. A finished run is saved under a name that has the sources' checksum: started
again, the command resumes where it was interrupted, and results of an older version are not reused.
"""

import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import quaver
from benchmarks.acceptance import report
from benchmarks.acceptance.report import ATTENTION, BASELINE, BLOCKS, LAYERS, RULES, Acceptance, Rule, Verdict
from benchmarks.acceptance.training import CONTROL, NUDGE, NULL, Outcome, Run, read, write
from benchmarks.measuring import machine, results
from quaver.recipes.text import folder_name
from quaver.train.config import FRAMEWORKS, check_choice

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a comparison."""

    steps: int = 300
    # Number of seeds, and the first of them.
    seeds: int = 3
    first: int = 0
    model: str = "tiny"
    # Text files and folders; none is the default text.
    text: tuple[str, ...] = ()
    # Rows of the table: recipes, and names in `variants`. All are compared with the first.
    recipes: tuple[str, ...] = (BASELINE, *LAYERS)
    # Fields of `Run` by row, where a row is more than its recipe; `after` names a row.
    variants: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {NULL: {"recipe": BASELINE, "nudge": NUDGE}}
    )
    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    # Condition on all rows together.
    verdict: Verdict | None = None
    framework: str = "torch"
    # Sequences of a step, and tokens of each.
    batch: int = 8
    sequence: int = 128
    # Folder of the runs.
    folder: Path = Path("runs/accept")
    # First part of the results' file name.
    name: str = "accept"

    def __post_init__(self) -> None:
        check_choice("framework", self.framework, FRAMEWORKS)

    def runs(self) -> list[Run]:
        shape = f"{self.steps}x{self.batch}x{self.sequence}"
        folder = self.folder.resolve() / f"{self.framework}-{self.model}-{shape}-{checksum()}"

        def place(row: str, seed: int) -> str:
            name = re.sub(r"\W+", "-", row) if row in self.variants else folder_name(row)
            return str(folder / f"{name}-seed{seed}")

        def run(row: str, seed: int) -> Run:
            own = {"recipe": row, **self.variants.get(row, {})}
            after = own.pop("after", "")
            return Run(
                row=row,
                seed=seed,
                steps=self.steps,
                batch=self.batch,
                sequence=self.sequence,
                model=self.model,
                text=self.text,
                framework=self.framework,
                folder=place(row, seed),
                after=place(after, seed) if after else "",
                **own,
            )

        return [run(row, seed) for seed in range(self.first, self.first + self.seeds) for row in self.recipes]


#: Recipes of the comparison of quantized attention; bf16 and control are those of the plain comparison, if it was run.
ATTENDING = (BASELINE, *ATTENTION, CONTROL)
#: Recipes for models with experts or state spaces, with the null model.
BESIDE_CHANCE = (BASELINE, NULL, *BLOCKS)


def of_blocks(model: str, **options: Any) -> Plan:
    """Return the plan for a model with experts or state spaces, with six seeds of small batches."""
    own = {"seeds": 6, "batch": 4, "sequence": 64, "recipes": BESIDE_CHANCE, "name": f"accept-{model}"}
    return Plan(model=model, **own | options)


def checksum() -> str:
    """Return the checksum of the library's sources."""
    package = Path(quaver.__file__).parent
    total = 0
    for path in sorted(package.rglob("*.py")):
        total = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(package)).encode(), total))
    return f"{total:08x}"


def accept(plan: Plan, jobs: int, console: Console, folder: Path = results.FOLDER) -> Acceptance:
    """Train what is not trained yet, print the verdicts and write them to `folder`."""
    runs = plan.runs()
    console.print(f"{sum(run.result.exists() for run in runs)} of {len(runs)} runs are there already", highlight=False)
    for later in (False, True):
        train_all([run for run in runs if bool(run.after) is later], jobs, console)
    done = Acceptance(
        steps=plan.steps,
        seeds=plan.seeds,
        first=plan.first,
        model=plan.model,
        text=" ".join(plan.text) or "the standard library of this Python",
        recipes=plan.recipes,
        rules=plan.rules,
        also={row: own["after"] for row, own in plan.variants.items() if "after" in own},
        verdict=plan.verdict,
        framework=plan.framework,
        batch=plan.batch,
        sequence=plan.sequence,
        outcomes={(run.row, run.seed): Outcome(**read(run.result)) for run in runs},
    )
    console.print(report.rich_table(done))
    console.print("accepted" if done.accepted else "not accepted", style="green" if done.accepted else "bold red")
    lines, data = report.markdown(done), report.data(done)
    name = plan.name if plan.framework == "torch" else f"{plan.name}-{plan.framework}"
    for path in results.write(folder, name, machine.describe(), lines, data):
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return done


def train_all(runs: Sequence[Run], jobs: int, console: Console) -> None:
    """Run those without a result, `jobs` at a time; an interrupt lets the active ones save first."""
    waiting = [run for run in runs if not run.result.exists()]
    active: list[tuple[Run, subprocess.Popen[bytes]]] = []
    begun, finished = time.perf_counter(), 0
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                run = waiting.pop(0)
                active.append((run, start(run)))
            time.sleep(0.1)
            for run, process in [pair for pair in active if pair[1].poll() is not None]:
                active.remove((run, process))
                outcome = collect(run)
                finished += 1
                left = (time.perf_counter() - begun) / finished * (len(waiting) + len(active)) / 60
                result = outcome.failure or f"loss {outcome.loss:.4f}"
                console.print(
                    f"{run.label:32} {result} ({outcome.seconds:.0f} s; {left:.0f} min left)", highlight=False
                )
    finally:
        for _, process in active:
            process.terminate()
        for _, process in active:
            process.wait()


def start(run: Run) -> "subprocess.Popen[bytes]":
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write(run.description, run)
    command = [sys.executable, "-m", "benchmarks.acceptance.training", str(run.description)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def collect(run: Run) -> Outcome:
    """Return the outcome of a finished run. Raises: RuntimeError with the last line of its log if there is none."""
    if run.result.exists():
        return Outcome(**read(run.result))
    log = Path(run.folder) / "log.txt"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    raise RuntimeError(f"{run.label} ended without a result: {lines[-1] if lines else 'no word'} (log: {log})")
