"""Statistics and text of a comparison: paired differences, Student's t intervals, verdicts and a table."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quaver.recipes.text import shown

#: Names of the run that the others are compared with, and of the same run from perturbed weights.
BASELINE, NULL = "bf16", "null"
#: Standard deviation of the relative change of each initial weight in a null run.
NUDGE = 1e-5

# ---- statistics ----


def t_95(freedom: int) -> float:
    """Return Student's t at 97.5 %: half the 95 % interval in standard errors.

    The probability of |t| is a finite series in cos²(atan(t / sqrt(freedom))), inverted by bisection.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    odd = freedom % 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        total, term = 0.0, math.cos(angle) if odd else 1.0
        for power in range(odd, freedom - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
        probability = math.sin(angle) * total
        if odd:
            probability = 2 / math.pi * (angle + probability)
        low, high = (angle, high) if probability < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def paired(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of the differences and its standard error; None if there are too few."""
    if not differences:
        return None, None
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return statistics.fmean(differences), error


def last_tenth(losses: Sequence[float]) -> float:
    """Return the mean of the last 10 % of the losses, rounded up to whole steps."""
    return statistics.fmean(losses[-math.ceil(len(losses) / 10) :])


def check_margin(margin: float) -> None:
    """Raise a ValueError unless a margin is positive and finite."""
    if not isinstance(margin, int | float) or not 0 < margin < math.inf:
        raise ValueError(f"margin is {shown(margin)}; give the largest difference that does not matter, such as 0.01")


# ---- results ----


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a comparison."""

    recipe: str
    seed: int
    # Training loss by step.
    losses: dict[int, float] = field(default_factory=dict)
    # The loss that is compared; None for a run that failed.
    final: float | None = None
    # Why the run has no final loss, in few words such as "diverged at step 7", and the details.
    failure: str = ""
    details: str = ""
    # Tokens per second; NaN where unknown.
    speed: float = math.nan
    # Steps at which the run changed its recipe.
    changes: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.recipe} seed {self.seed}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs of several recipes over the same seeds; prints as a table."""

    runs: tuple[ComparedRun, ...]
    # Largest difference from the baseline, in nats, that counts as none.
    margin: float = 0.01
    # Name of the loss that is compared.
    measure: str = "Mean loss of the last 10 % of steps, nats"
    # Name of the recipe that the others are compared with.
    baseline: str = BASELINE
    # Quantized GEMMs were emulated.
    emulated: bool = False
    # Sentences on the setting, for the report.
    setting: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.measure + ", emulated" * self.emulated

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run.recipe for run in self.runs))

    @property
    def losses(self) -> dict[str, dict[int, list[float]]]:
        """Return the training losses of each step by recipe and seed."""
        return {
            recipe: {run.seed: list(run.losses.values()) for run in self.runs if run.recipe == recipe}
            for recipe in self.recipes
        }

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs})

    @property
    def failures(self) -> list[str]:
        """Return a sentence for each run that failed."""
        return [
            f"{run.label} {run.failure}" + (f": {run.details}" if run.details else "")
            for run in self.runs
            if run.failure
        ]

    def finished(self, recipe: str) -> dict[int, ComparedRun]:
        """Return the finished runs of a recipe by seed."""
        return {run.seed: run for run in self.runs if run.recipe == recipe and run.final is not None}

    def pairs(self, recipe: str) -> list[tuple[ComparedRun, ComparedRun]]:
        """Return a recipe's finished runs, each with the baseline's run of the same seed."""
        baseline = self.finished(self.baseline)
        return [(run, baseline[seed]) for seed, run in self.finished(recipe).items() if seed in baseline]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return a dict per recipe: recipe, n (seeds, or pairs of seeds), loss, difference from the baseline, low and
        high (the ends of its 95 % interval), tokens_per_second and verdict.
        """
        return [self.row(recipe) for recipe in self.recipes]

    def row(self, recipe: str) -> dict[str, Any]:
        runs = self.finished(recipe).values()
        failure = next((run.failure for run in self.runs if run.recipe == recipe and run.failure), "")
        row: dict[str, Any] = {"recipe": recipe, "n": len(runs), "loss": None, "difference": None}
        row |= {"low": None, "high": None, "tokens_per_second": None, "verdict": failure}
        if runs:
            row["loss"] = statistics.fmean([run.final for run in runs if run.final is not None])
            speed = statistics.fmean(run.speed for run in runs)
            row["tokens_per_second"] = None if math.isnan(speed) else speed
        if recipe == self.baseline or failure:
            return row
        differences = [(run.final or 0.0) - (other.final or 0.0) for run, other in self.pairs(recipe)]
        row["n"] = len(differences)
        mean, error = paired(differences)
        row["difference"] = mean
        if mean is None:
            row["verdict"] = f"no {self.baseline} to compare with"
        elif error is None:
            row["verdict"] = "one seed: no verdict"
        else:
            half = error * t_95(len(differences) - 1)
            row["low"], row["high"] = mean - half, mean + half
            row["verdict"] = self.verdict(mean - half, mean + half, len(differences))
        return row

    def verdict(self, low: float, high: float, n: int) -> str:
        """Return the verdict on a 95 % interval of a difference."""
        if -self.margin <= low and high <= self.margin:
            return f"equivalent to {self.baseline} within ±{self.margin:g} nats (n = {n})"
        return "different" if low > 0 or high < 0 else "undecided: more seeds"

    @property
    def notes(self) -> list[str]:
        """Return sentences that explain the table."""
        notes = list(self.setting)
        if self.seeds == 1:
            notes.append("With one seed no interval can be given; three seeds show what is chance.")
        else:
            notes.append(
                "A difference is paired by seed: its mean over seeds, and the 95 % confidence interval of that mean "
                f"(Student's t over {self.seeds} seeds" + ("; two seeds say little)." if self.seeds == 2 else ").")
            )
        if NULL in self.recipes:
            notes.append(
                f"{NULL} is {self.baseline} with each initial weight times 1 + 1e-5·randn: what chance alone does."
            )
            row = self.row(NULL)
            if any(run.losses == other.losses for run, other in self.pairs(NULL)):
                notes.append(f"{NULL} has the losses of {self.baseline} bit for bit: no weight was perturbed.")
            if row["low"] is not None and not row["verdict"].startswith("equivalent"):
                notes.append(
                    f"{NULL} itself is not within ±{self.margin:g} nats, so that no recipe can be shown to be: take "
                    "more seeds or steps, or a larger margin."
                )
        if self.emulated:
            notes.append(
                "Quantized GEMMs were emulated: losses are those of the formats, and speeds say nothing of a GPU that "
                "has them."
            )
        return notes

    # ---- text ----

    def table(self) -> list[list[str]]:
        """Return the header and the rows as text."""
        rows = self.rows
        keys = [key for key in rows[0] if key not in ("low", "high") and any(row[key] is not None for row in rows)]
        titles = {"difference": f"minus {self.baseline}", "tokens_per_second": "tokens/s"}
        lines = [[titles.get(key, key) for key in keys]] + [[_cell(key, row[key]) for key in keys] for row in rows]
        if "difference" in keys:
            intervals = ["" if row["low"] is None else f"{signed(row['low'])} to {signed(row['high'])}" for row in rows]
            for line, interval in zip(lines, ["95 % interval", *intervals], strict=True):
                line.insert(keys.index("difference") + 1, interval)
        return lines

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [self.title]
        for line in lines:
            texts.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return "\n".join([*texts, *self.failures])

    __repr__ = __str__


def signed(value: float) -> str:
    """Return a difference of losses as text: four digits after the point, or one digit if it is smaller than those."""
    return f"{value:+.4f}" if abs(value) >= 5e-5 or not value else f"{value:+.0e}".replace("e-0", "e-")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "difference":
        return signed(value)
    return format(value, {"loss": ".4f", "tokens_per_second": ",.0f"}.get(key, ""))
