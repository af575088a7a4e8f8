"""A comparison's result: its runs, and a recipe's *paired* difference from bf16 with its standard error.

A difference is a recipe's validation loss minus bf16's with the same seed; its mean over seeds counts.
Two curves that look alike prove nothing; the seeds' spread says how small a difference can be seen at all.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quaver.train.configuration.config import TrainConfig
from quaver.train.records.metrics import Record, losses, validation_losses

BASELINE = "bf16"
#: Student's t at 97.5 % for 1, 2, ... degrees of freedom: a 95 % interval is so many standard errors to either side.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recipe with one seed: its configuration, its records and its failure."""

    config: TrainConfig
    records: tuple[Record, ...] = ()
    # Why it failed, or None.
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
        """Median tokens per second; NaN where no step was recorded."""
        speeds = [record["tokens_per_second"] for record in self.records if "tokens_per_second" in record]
        return statistics.median(speeds) if speeds else math.nan


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe over all seeds; a difference is from bf16 with the same seed, in nats a token."""

    recipe: str
    seeds: int
    loss: float
    difference: float | None
    # Standard error of the difference over seeds (n - 1); None with a single seed.
    error: float | None
    # Half of the difference's 95 % confidence interval; None with a single seed.
    interval: float | None
    speed: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs of a comparison, finished or failed."""

    folder: Path
    runs: tuple[Run, ...]
    jobs: int
    # Fingerprint of the tokens that every run was trained on.
    text: str = ""

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run.config.recipe for run in self.runs))

    @property
    def failures(self) -> list[Run]:
        return [run for run in self.runs if run.failure]

    def finished(self, recipe: str) -> dict[int, Run]:
        """The finished runs of a recipe by seed."""
        return {run.config.seed: run for run in self.runs if run.config.recipe == recipe and not run.failure}

    def pairs(self, recipe: str) -> list[tuple[Run, Run]]:
        """A recipe's runs, each with bf16's of the same seed."""
        baseline = self.finished(BASELINE)
        return [(run, baseline[seed]) for seed, run in self.finished(recipe).items() if seed in baseline]

    def rows(self) -> list[Row]:
        return [self.row(recipe) for recipe in self.recipes if self.finished(recipe)]

    def row(self, recipe: str) -> Row:
        runs = list(self.finished(recipe).values())
        differences = [final(run) - final(baseline) for run, baseline in self.pairs(recipe)]
        mean, error = paired(differences)
        return Row(
            recipe=recipe,
            seeds=len(runs),
            loss=statistics.fmean(final(run) for run in runs),
            difference=mean,
            error=error,
            interval=None if error is None else interval_of(error, len(differences)),
            speed=statistics.fmean(run.speed for run in runs),
        )


def final(run: Run) -> float:
    return run.validation_losses[run.config.steps]


def paired(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of the differences and its standard error; None where there are too few differences."""
    if not differences:
        return None, None
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return statistics.fmean(differences), error


def interval_of(error: float, number: int) -> float:
    """Half of the 95 % confidence interval of a mean, from its standard error over so many values."""
    freedom = number - 1
    # Beyond the table 1.96 + 2.5 / freedom is within 0.01 of Student's t.
    return error * (T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.5 / freedom)
