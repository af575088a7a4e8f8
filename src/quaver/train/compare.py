"""Comparison of recipes: run them with several seeds and compute each recipe's *paired* difference from bf16.

A difference is a recipe's validation loss minus bf16's with the same seed; the mean over seeds is reported. Similar
curves prove nothing: the spread over seeds tells how small a difference can be detected.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quaver.recipes.text import shown
from quaver.train import checkpoint, data, files, frameworks, loop, metrics
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig, read_run, to_toml
from quaver.train.loop import Interrupt, Interrupted
from quaver.train.mesh import world
from quaver.train.metrics import Record, losses, newest, read, validation_losses

# ---- results ----

BASELINE = "bf16"
#: Student's t at 97.5 % for 1, 2, ... degrees of freedom: half the 95 % interval in standard errors.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One recipe with one seed: its configuration, its records and its failure."""

    config: TrainConfig
    records: tuple[Record, ...] = ()
    # Message of the failure, or None.
    failure: str | None = None

    @property
    def label(self) -> str:
        return f"{self.config.recipe} seed {self.config.seed}"

    @property
    def losses(self) -> dict[int, float]:
        return losses(list(self.records))

    @property
    def validation_losses(self) -> dict[int, float]:
        return validation_losses(list(self.records))

    @property
    def done(self) -> bool:
        return self.config.steps in self.validation_losses

    @property
    def speed(self) -> float:
        """Median tokens per second; NaN without training records."""
        speeds = [record["tokens_per_second"] for record in self.records if "tokens_per_second" in record]
        return statistics.median(speeds) if speeds else math.nan


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """A recipe's results over all seeds; differences from bf16 with the same seed in nats per token."""

    recipe: str
    seeds: int
    loss: float
    difference: float | None
    # Standard error of the difference over seeds (n - 1); None for a single seed.
    error: float | None
    # Half of the difference's 95 % confidence interval; None for a single seed.
    interval: float | None
    speed: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs of a comparison, finished or failed."""

    folder: Path
    runs: tuple[SeedRun, ...]
    jobs: int
    # Fingerprint of the tokens that every run was trained on.
    text: str = ""

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run.config.recipe for run in self.runs))

    @property
    def failures(self) -> list[SeedRun]:
        return [run for run in self.runs if run.failure]

    def finished(self, recipe: str) -> dict[int, SeedRun]:
        """Return the finished runs of a recipe by seed."""
        return {run.config.seed: run for run in self.runs if run.config.recipe == recipe and not run.failure}

    def pairs(self, recipe: str) -> list[tuple[SeedRun, SeedRun]]:
        """Return a recipe's runs, each paired with the bf16 run of the same seed."""
        baseline = self.finished(BASELINE)
        return [(run, baseline[seed]) for seed, run in self.finished(recipe).items() if seed in baseline]

    def rows(self) -> list[RecipeRow]:
        return [self.row(recipe) for recipe in self.recipes if self.finished(recipe)]

    def row(self, recipe: str) -> RecipeRow:
        runs = list(self.finished(recipe).values())
        differences = [final(run) - final(baseline) for run, baseline in self.pairs(recipe)]
        mean, error = paired(differences)
        return RecipeRow(
            recipe=recipe,
            seeds=len(runs),
            loss=statistics.fmean(final(run) for run in runs),
            difference=mean,
            error=error,
            interval=None if error is None else interval_of(error, len(differences)),
            speed=statistics.fmean(run.speed for run in runs),
        )


def final(run: SeedRun) -> float:
    return run.validation_losses[run.config.steps]


def paired(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the differences and its standard error; None if there are too few."""
    if not differences:
        return None, None
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return statistics.fmean(differences), error


def interval_of(error: float, number: int) -> float:
    """Return half of the 95 % confidence interval of a mean of `number` values from its standard error."""
    freedom = number - 1
    # Beyond the table, 1.96 + 2.5 / freedom is within 0.01 of Student's t.
    return error * (T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom)


# ---- running ----
# Train the same model on the same batches under several recipes, each run in its own process.

#: Maximum number of runs of a comparison.
MOST = 10_000
#: Files in a comparison's folder besides its runs; the command line writes the last two.
FILES = (data.NAME, "tokenizer.json", "report.md", "compare.png")
#: File in each run's folder with that run's output.
LOG = "log.txt"


def compare_runs(
    config: TrainConfig,
    recipes: Sequence[str],
    *,
    seeds: int = 1,
    jobs: int = 0,
    resume: bool = False,
    watch: Callable[[Sequence[SeedRun]], None] = lambda runs: None,
) -> Comparison:
    """Train under each recipe with each seed and collect the runs; bf16 is always included, first.

    Args:
        config: options of every run; `recipe` is replaced, `seed` is the first seed, `out` the comparison's folder.
        recipes: as `TrainConfig.recipe` accepts them.
        seeds: runs per recipe, with seeds config.seed, config.seed + 1, ...
        jobs: number of parallel runs; 0: as many as fill the cores, or one on a GPU.
        resume: leave finished runs unchanged and continue the others.
        watch: called a few times per second with the present state of all runs.
    Raises: ValueError for bad input, before anything is started. A run that fails is reported, not raised.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {shown(seeds)}; it must be at least 1")
    if len(recipes) * seeds > MOST:
        raise ValueError(f"{len(recipes)} recipes with {shown(seeds)} seeds are more than {MOST} runs; take fewer")
    if jobs < 0:
        raise ValueError(f"jobs is {shown(jobs)}; it must be at least 0, which is as many as fill the cores")
    if (ranks := world()) > 1:
        raise ValueError(f"a comparison starts its runs itself, and here are {ranks} ranks; start it without torchrun")
    for recipe in recipes:
        for part in recipe_name.schedule_of(replace(config, recipe=recipe)).parts:
            frameworks.check_options(replace(config, recipe=recipe), part.recipe)
    metrics.check_trackers(config)
    loop.warn_of_idle_options(config, 1)
    framework = "" if config.framework == "torch" else f"-{config.framework}"
    folder = Path(config.out or f"runs/compare-{config.model}{framework}")
    threads = config.threads or 1
    jobs = jobs or (max(1, cores() // threads) if frameworks.runs_on_cpu(config) else 1)
    with files.locked(folder, "a comparison"):
        files.check_places(folder, FILES)
        config, text = share_text(config, folder, resume)
        names = list(dict.fromkeys([BASELINE, *recipes]))
        waiting = [
            replace(config, recipe=name, seed=seed, out=str(folder / f"{recipe_name.folder_name(name)}-seed{seed}"))
            for name in names
            for seed in range(config.seed, config.seed + seeds)  # runs of equal length side by side
        ]
        for run in waiting:
            check_places(Path(run.out))
            if resume:
                check_same_options(run, text)
        runs = run_all([SeedRun(config=run) for run in waiting], jobs, threads, watch)
        runs = [replace(run, failure=run.failure or other_text_error(run.config, text)) for run in runs]
        return Comparison(folder=folder, runs=tuple(runs), jobs=jobs, text=text)


def check_places(folder: Path) -> None:
    """Raise a ValueError if a run's folder, or one of its files, exists as something else."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; move it away")
    files.check_places(folder, (*loop.FILES, LOG))


def check_same_options(config: TrainConfig, text: str) -> None:
    """Raise a ValueError if the run to resume was started with other options or on other text."""
    path = Path(config.out) / "config.toml"
    for name, before in (read_run(path) if path.exists() else {}).items():
        check_option(f"{path} has {name}", before, getattr(config, name))
    if why := other_text_error(config, text):
        raise ValueError(f"{config.out} cannot go on: {why}; delete that folder, or give another --out")


def check_option(option: str, before: object, now: object) -> None:
    """Raise a ValueError if an option has changed."""
    if now != before:
        raise ValueError(
            f"{option} = {shown(before)}, and now it is {shown(now)}; resume with the same options, or give another "
            "--out"
        )


def other_text_error(config: TrainConfig, text: str) -> str | None:
    """Return why a run is not comparable if it was trained on another text, else None."""
    last = checkpoint.latest(Path(config.out))
    seen = checkpoint.read_state(last).get("text") if last else text
    return None if seen == text else f"{last} was trained on a text of fingerprint {seen}, and this one's is {text}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_text(config: TrainConfig, folder: Path, resume: bool) -> tuple[TrainConfig, str]:
    """Read and tokenize the text once, into files of the comparison's folder that every run reads.

    Returns: the config with options to read these files, and the fingerprint of the tokens.
    Raises: ValueError if the folder has a comparison that is not resumed, or was started with another text.
    """
    path, learnt = folder / data.NAME, folder / "tokenizer.json"
    if not resume and [*folder.glob("*/metrics.jsonl"), *folder.glob("*/step-*")]:
        raise ValueError(f"{folder} already holds a run; continue it with --resume, or give another --out")
    options_read_with = {"text": list(config.text), "tokens": config.tokens, "vocab": config.vocab}
    if resume and path.exists():
        saved = data.read(path)
        for name, now in options_read_with.items():
            check_option(f"{path} was read with {name}", saved.options_read_with.get(name), now)
    else:
        read = data.load(config, learnt if resume and learnt.exists() else None, folder)
        if read.tokenizer is not None:
            files.write(learnt, read.tokenizer.to_str(pretty=True))
        saved = data.SavedTokens(read.train, read.validation, data.digest(read.tokenizer), options_read_with)
        data.write(path, saved)
    return replace(config, text=(str(path),), tokens=str(learnt) if saved.tokenizer else "byte"), saved.fingerprint


def run_all(runs: list[SeedRun], jobs: int, threads: int, watch: Callable[[Sequence[SeedRun]], None]) -> list[SeedRun]:
    """Work through the runs, `jobs` at a time; returns them with their records and failures."""
    runs = [reload_run(run) for run in runs]
    waiting = [index for index, run in enumerate(runs) if not run.done]
    active: dict[int, subprocess.Popen[bytes]] = {}
    with Interrupt() as interrupt:
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    index = waiting.pop(0)
                    active[index] = start_run(runs[index].config, threads)
                time.sleep(0.2)
                for index, process in list(active.items()):
                    ended = process.poll() is not None
                    runs[index] = reload_run(runs[index], read if ended else newest)
                    if ended:
                        del active[index]
                        runs[index] = judge_run(runs[index], process.returncode)
                watch(runs)
                if interrupt.number:
                    raise Interrupted("stopped, every run saved; continue with --resume", interrupt.number)
        finally:  # however the comparison ends, end its runs too
            stop_runs(list(active.values()))
    return runs


def judge_run(run: SeedRun, returncode: int) -> SeedRun:
    """Return an ended run, with its failure if it failed."""
    return replace(run, failure=last_log_line(run.config)) if returncode or not run.done else run


def reload_run(run: SeedRun, look: Callable[[Path], list[Record]] = read) -> SeedRun:
    """Return the run with the present records of its metrics file, as `look` reads them."""
    return replace(run, records=tuple(look(Path(run.config.out) / "metrics.jsonl")))


def start_run(config: TrainConfig, threads: int) -> "subprocess.Popen[bytes]":
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "config.toml", to_toml(config))
    command = [sys.executable, "-m", "quaver.train", "train", "--config", str(folder / "config.toml")]
    command += ["--out", str(folder), "--quiet", "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    (folder / LOG).unlink(missing_ok=True)
    with (folder / LOG).open("xb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def last_log_line(config: TrainConfig) -> str:
    """Return the last line of a run's output."""
    lines = (Path(config.out) / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")


def stop_runs(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask the runs to finish their step, save and end, and wait for them."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
