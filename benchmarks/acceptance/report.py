"""What the runs of `accept` amount to: paired differences from bf16, their standard errors, and a verdict each."""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.acceptance.training import CONTROL, Outcome
from benchmarks.measuring import results
from quaver.train.records.comparison import paired

BASELINE = "bf16"
COLUMNS = ("recipe", "validation loss", "minus bf16 ± std. error", "by seed", "rule", "verdict", "weight error, %")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the absolute mean difference must be: below a limit, or above it."""

    limit: float
    # The limit is a fraction of bf16's loss, not nats.
    relative: bool = False
    # The difference must be larger, and a run that fails is far enough off.
    above: bool = False

    def holds(self, difference: float, baseline: float) -> bool:
        limit = self.limit * baseline if self.relative else self.limit
        return abs(difference) > limit if self.above else abs(difference) <= limit

    def __str__(self) -> str:
        limit = f"{100 * self.limit:g} %" if self.relative else f"{self.limit:g} nats"
        return f"{'>' if self.above else '≤'} {limit}"


CLOSE = Rule(limit=0.01)
#: Recipes of linear layers, and a control that must be seen to fail.
LAYERS: Mapping[str, Rule] = {
    "delayed": CLOSE,
    "tensorwise": CLOSE,
    "rowwise": CLOSE,
    "blockwise": CLOSE,
    "mxfp8": CLOSE,
    "nvfp4": Rule(limit=0.02, relative=True),
    CONTROL: Rule(limit=0.3, above=True),
}
#: Recipes that quantize attention too.
ATTENTION: Mapping[str, Rule] = {
    f"{name}(attention=True)": CLOSE for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
}
RULES: Mapping[str, Rule] = {**LAYERS, **ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe over all seeds."""

    recipe: str
    # Mean validation loss of the runs that did not fail.
    loss: float | None
    # From bf16 with the same seed, in the order of the seeds; their mean; its standard error.
    differences: tuple[float, ...]
    difference: float | None
    error: float | None
    accepted: bool
    # Smallest and largest over layers and seeds; None for bf16.
    weight_errors: tuple[float, float] | None
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """All runs, by recipe and seed."""

    steps: int
    seeds: int
    model: str
    # What was trained on, in words.
    text: str
    recipes: tuple[str, ...]
    framework: str = "torch"
    outcomes: Mapping[tuple[str, int], Outcome]

    @property
    def accepted(self) -> bool:
        return all(row.accepted for row in self.rows())

    def losses(self, recipe: str) -> dict[int, float]:
        """By seed, of the runs that did not fail."""
        by_seed = {seed: self.outcomes[recipe, seed].loss for seed in range(self.seeds)}
        return {seed: loss for seed, loss in by_seed.items() if loss is not None}

    def rows(self) -> list[Row]:
        return [self.row(recipe) for recipe in self.recipes]

    def row(self, recipe: str) -> Row:
        own, base = self.losses(recipe), self.losses(BASELINE)
        outcomes = [self.outcomes[recipe, seed] for seed in range(self.seeds)]
        failures = tuple(outcome.failure for outcome in outcomes if outcome.failure)
        differences = () if recipe == BASELINE else tuple(own[seed] - base[seed] for seed in own if seed in base)
        mean, error = paired(differences)
        if recipe == BASELINE:
            accepted = not failures
        elif failures:
            accepted = RULES[recipe].above
        else:
            accepted = mean is not None and RULES[recipe].holds(mean, statistics.fmean(base.values()))
        weights = [error for outcome in outcomes for error in outcome.weight_errors.values()]
        return Row(
            recipe=recipe,
            loss=statistics.fmean(own.values()) if own else None,
            differences=differences,
            difference=mean,
            error=error,
            accepted=accepted,
            weight_errors=(min(weights), max(weights)) if weights else None,
            failures=failures,
        )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text in the order of COLUMNS."""
    baseline = row.recipe == BASELINE
    error = "" if row.error is None else f" ± {row.error:.4f}"
    return (
        row.recipe,
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.difference is None else f"{row.difference:+.4f}{error}",
        " ".join(f"{difference:+.4f}" for difference in row.differences),
        "" if baseline else str(RULES[row.recipe]),
        ("" if baseline else "PASS") if row.accepted else "FAIL",
        "" if row.weight_errors is None else "{:.2f} to {:.2f}".format(*(100 * e for e in row.weight_errors)),
    )


def rich_table(done: Acceptance) -> Table:
    shown = Table(title="Final validation loss, nats a token", title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "recipe" else "right")
    for row in done.rows():
        shown.add_row(*cells(row), style="" if row.accepted else "bold red")
    return shown


def markdown(done: Acceptance) -> list[str]:
    rows = done.rows()
    verdict = "Accepted." if done.accepted else "**Not accepted.**"
    failures = [f"\n{row.recipe} failed: {failure}" for row in rows for failure in row.failures]
    return [
        "# Training runs that a release is accepted by",
        "",
        f"Framework {done.framework}, model `{done.model}`, {done.steps} steps, seeds 0 to {done.seeds - 1}, text: "
        f"{done.text}; the same initial weights and batches under every recipe, embedding and head in bf16. Nats a "
        "token.",
        "",
        *results.table(COLUMNS, [cells(row) for row in rows]),
        *failures,
        "",
        f"{verdict} A difference is paired by seed: its mean over seeds, and that mean's standard error (n - 1). "
        f"`{CONTROL}` has every scale at 1 and must be off: the comparison is seen to be able to fail. The "
        "weight error is the relative RMS of dequantize(quantize(w)) - w: the smallest and the largest of all "
        "converted layers, each of which was checked not to be zero; so was the error of each layer's attention where "
        "the recipe quantizes it.",
    ]


def data(done: Acceptance) -> dict[str, Any]:
    runs = [
        {"recipe": recipe, "seed": seed, **dataclasses.asdict(outcome)}
        for (recipe, seed), outcome in done.outcomes.items()
    ]
    setting = {
        "framework": done.framework,
        "model": done.model,
        "text": done.text,
        "steps": done.steps,
        "seeds": done.seeds,
        "accepted": done.accepted,
    }
    return {**setting, "rows": [dataclasses.asdict(row) for row in done.rows()], "runs": runs}
