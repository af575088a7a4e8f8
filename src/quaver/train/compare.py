"""Comparison of recipes by the trainer: each with several seeds, each run in its own process, on the same batches.

The final validation losses are compared by `quaver.comparison`.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from quaver.comparison.report import PICTURE, REPORT
from quaver.comparison.results import (
    BASELINE,
    NUDGE,
    NULL,
    ComparedRun,
    Comparison,
    check_margin,
)
from quaver.recipes.text import folder_name, shown
from quaver.train import checkpoint, data, files, frameworks, loop, metrics
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig, read_run, to_toml
from quaver.train.loop import Interrupt, Interrupted
from quaver.train.mesh import world
from quaver.train.metrics import Record, losses, newest, phase_starts, read, validation_losses

# ---- runs ----


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """One recipe with one seed: its configuration, its records and its failure."""

    config: TrainConfig
    records: tuple[Record, ...] = ()
    # Message of the failure, or None.
    failure: str | None = None

    @property
    def recipe(self) -> str:
        return NULL if self.config.nudge else self.config.recipe

    @property
    def label(self) -> str:
        return f"{self.recipe} seed {self.config.seed}"

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
    def result(self) -> ComparedRun:
        """Return the final validation loss or the failure, for a comparison."""
        speeds = [record["tokens_per_second"] for record in self.records if "tokens_per_second" in record]
        return ComparedRun(
            recipe=self.recipe,
            seed=self.config.seed,
            losses=self.losses,
            final=None if self.failure else self.validation_losses[self.config.steps],
            failure="failed" if self.failure else "",
            details=f"{self.failure} (its log: {self.config.out}/{LOG})" if self.failure else "",
            speed=statistics.median(speeds) if speeds else math.nan,
            changes=tuple(phase_starts(self.records)),
        )


# ---- running ----
#: Maximum number of runs of a comparison.
MOST = 10_000
#: Files in a comparison's folder besides its runs; the command line writes the last two.
FILES = (data.NAME, "tokenizer.json", REPORT, PICTURE)
#: File in each run's folder with that run's output.
LOG = "log.txt"


def compare_runs(
    config: TrainConfig,
    recipes: Sequence[str],
    *,
    seeds: int = 1,
    jobs: int = 0,
    margin: float = 0.01,
    resume: bool = False,
    watch: Callable[[Sequence[SeedRun]], None] = lambda runs: None,
) -> Comparison:
    """Train under each recipe with each seed; bf16 and bf16 from perturbed weights are always included, first.

    Args:
        config: options of every run; `recipe` is replaced, `seed` is the first seed, `out` the comparison's folder.
        recipes: as `TrainConfig.recipe` accepts them.
        seeds: runs per recipe, with seeds config.seed, config.seed + 1, ...
        jobs: number of parallel runs; 0: as many as fill the cores, or one on a GPU.
        margin: largest difference from bf16, in nats, that counts as none.
        resume: leave finished runs unchanged and continue the others.
        watch: called a few times per second with the present state of all runs.
    Raises: ValueError for bad input, before anything is started. A run that fails is reported, not raised.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {shown(seeds)}; it must be at least 1")
    if len(recipes) * seeds > MOST:
        raise ValueError(f"{len(recipes)} recipes with {shown(seeds)} seeds are more than {MOST} runs; take fewer")
    check_margin(margin)
    if jobs < 0:
        raise ValueError(f"jobs is {shown(jobs)}; it must be at least 0, which is as many as fill the cores")
    if (ranks := world()) > 1:
        raise ValueError(f"a comparison starts its runs itself, and here are {ranks} ranks; start it without torchrun")
    for recipe in recipes:
        for part in recipe_name.schedule_of(replace(config, recipe=recipe)).parts:
            frameworks.check_options(replace(config, recipe=recipe), part.recipe)
    metrics.check_trackers(config)
    loop.warn_of_idle_options(config, 1)
    folder = folder_of(config)
    threads = config.threads or 1
    jobs = jobs or (max(1, cores() // threads) if frameworks.runs_on_cpu(config) else 1)
    with files.locked(folder, "a comparison"):
        files.check_places(folder, FILES)
        config, text = share_text(config, folder, resume)
        changed = {name: (name, 0.0) for name in [BASELINE, NULL, *recipes]} | {NULL: (BASELINE, NUDGE)}
        waiting = [
            replace(config, recipe=recipe, nudge=nudge, seed=seed, out=str(folder / f"{folder_name(name)}-seed{seed}"))
            for name, (recipe, nudge) in changed.items()
            for seed in range(config.seed, config.seed + seeds)  # runs of equal length side by side
        ]
        for run in waiting:
            check_places(Path(run.out))
            if resume:
                check_same_options(run, text)
        runs = run_all([SeedRun(config=run) for run in waiting], jobs, threads, watch)
        runs = [replace(run, failure=run.failure or other_text_error(run.config, text)) for run in runs]
        return Comparison(
            runs=tuple(run.result for run in runs),
            margin=margin,
            measure="Final validation loss, nats a token",
            emulated=frameworks.runs_on_cpu(config),
            setting=tuple(describe_setting(config, seeds, jobs, text)),
        )


def folder_of(config: TrainConfig) -> Path:
    """Return the folder of a comparison."""
    framework = "" if config.framework == "torch" else f"-{config.framework}"
    return Path(config.out or f"runs/compare-{config.model}{framework}")


def describe_setting(config: TrainConfig, seeds: int, jobs: int, text: str) -> list[str]:
    """Return sentences on the options that all runs share."""
    tokens = config.batch * config.accumulate * config.sequence
    which = f"seed {config.seed}" if seeds == 1 else f"seeds {config.seed} to {config.seed + seeds - 1}"
    sentences = [
        f"Model {config.model}, {config.steps} steps of {tokens} tokens, {which}, {config.framework} "
        f"{version(config.framework)}; the same initial weights and batches under every recipe (the text's "
        f"fingerprint: {text})."
    ]
    if jobs > 1:
        sentences.append(f"Speeds are of {jobs} runs side by side; --jobs 1 times each alone.")
    return sentences


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
