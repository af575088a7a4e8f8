"""What the runs of `accept` amount to: paired differences from bf16, their standard errors, and a verdict each."""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.acceptance.training import CONTROL, CONTROLS, NARROW, NUDGE, NULL, Outcome
from benchmarks.measuring import results
from quaver.train.compare import paired

BASELINE = "bf16"
COLUMNS = ("recipe", "validation loss", "minus bf16 ± std. error", "by seed", "rule", "verdict", "weight error, %")
#: Of a model with experts, besides.
CHOICES = "choices unlike bf16's, %"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the absolute mean difference must be: below a limit, or above it."""

    limit: float
    # The limit is a fraction of bf16's loss, not nats.
    relative: bool = False
    # The difference must be larger, and a run that fails is far enough off.
    above: bool = False

    def holds(self, difference: float, baseline: float, chance: float = 0.0) -> bool:
        """Whether a mean difference fits.

        Args:
            chance: two standard errors of the null model's, which a limit in nats allows besides.
        """
        limit = self.limit * baseline if self.relative else self.limit + chance * (not self.above)
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
#: Of models with experts or state spaces.
BLOCKS: Mapping[str, Rule] = {NARROW if name == CONTROL else name: rule for name, rule in LAYERS.items()}
RULES: Mapping[str, Rule] = {**LAYERS, **ATTENTION, **BLOCKS}


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
    # Mean over seeds of the share of choices of experts that the same weights do not make under bf16.
    choices_differ: float | None = None


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
    batch: int = 8
    sequence: int = 128
    outcomes: Mapping[tuple[str, int], Outcome]

    @property
    def accepted(self) -> bool:
        return all(row.accepted for row in self.rows())

    def losses(self, recipe: str) -> dict[int, float]:
        """By seed, of the runs that did not fail."""
        by_seed = {seed: self.outcomes[recipe, seed].loss for seed in range(self.seeds)}
        return {seed: loss for seed, loss in by_seed.items() if loss is not None}

    @property
    def chance(self) -> float:
        """Two standard errors of the null model's differences from bf16; 0 where none was trained."""
        if NULL not in self.recipes:
            return 0.0
        own, base = self.losses(NULL), self.losses(BASELINE)
        return 2 * (paired([own[seed] - base[seed] for seed in own if seed in base])[1] or 0.0)

    def rows(self) -> list[Row]:
        return [self.row(recipe) for recipe in self.recipes]

    def row(self, recipe: str) -> Row:
        own, base = self.losses(recipe), self.losses(BASELINE)
        outcomes = [self.outcomes[recipe, seed] for seed in range(self.seeds)]
        failures = tuple(outcome.failure for outcome in outcomes if outcome.failure)
        differences = () if recipe == BASELINE else tuple(own[seed] - base[seed] for seed in own if seed in base)
        mean, error = paired(differences)
        if recipe in (BASELINE, NULL):
            accepted = not failures
        elif failures:
            accepted = RULES[recipe].above
        else:
            accepted = mean is not None and RULES[recipe].holds(mean, statistics.fmean(base.values()), self.chance)
        weights = [error for outcome in outcomes for error in outcome.weight_errors.values()]
        counted = [outcome.choices_differ for outcome in outcomes if outcome.choices_differ is not None]
        return Row(
            recipe=recipe,
            loss=statistics.fmean(own.values()) if own else None,
            differences=differences,
            difference=mean,
            error=error,
            accepted=accepted,
            weight_errors=(min(weights), max(weights)) if weights else None,
            failures=failures,
            choices_differ=statistics.fmean(counted) if counted else None,
        )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text in the order of COLUMNS."""
    baseline = row.recipe in (BASELINE, NULL)
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
    rows = done.rows()
    columns, lines = table(rows)
    for column in columns:
        shown.add_column(column, justify="left" if column == "recipe" else "right")
    for row, line in zip(rows, lines, strict=True):
        shown.add_row(*line, style="" if row.accepted else "bold red")
    return shown


def table(rows: list[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells; with what is counted of experts where there are some."""
    lines = [cells(row) for row in rows]
    if all(row.choices_differ is None for row in rows):
        return COLUMNS, lines
    counted = ["" if row.choices_differ is None else f"{100 * row.choices_differ:.2f}" for row in rows]
    return (*COLUMNS, CHOICES), [(*line, number) for line, number in zip(lines, counted, strict=True)]


def markdown(done: Acceptance) -> list[str]:
    rows = done.rows()
    verdict = "Accepted." if done.accepted else "**Not accepted.**"
    control = next((row.recipe for row in rows if row.recipe in CONTROLS), CONTROL)
    failures = [f"\n{row.recipe} failed: {failure}" for row in rows for failure in row.failures]
    return [
        "# Training runs that a release is accepted by",
        "",
        f"Framework {done.framework}, model `{done.model}`, {done.steps} steps of {done.batch} x "
        f"{done.sequence} tokens, seeds 0 to {done.seeds - 1}, text: "
        f"{done.text}; the same initial weights and batches under every recipe, embedding and head in bf16. Nats a "
        "token.",
        "",
        *results.table(*table(rows)),
        *failures,
        "",
        f"{verdict} A difference is paired by seed: its mean over seeds, and that mean's standard error (n - 1). "
        f"`{control}` has every scale at 1 and must be off: the comparison is seen to be able to fail. The "
        "weight error is the relative RMS of dequantize(quantize(w)) - w: the smallest and the largest of all "
        "converted layers, each of which was checked not to be zero; so was the error of each layer's attention where "
        "the recipe quantizes it." + said_of_chance(done),
    ]


def said_of_chance(done: Acceptance) -> str:
    """What the null model is, where one was trained."""
    if NULL not in done.recipes:
        return ""
    return (
        f" `{NULL}` is bf16 from weights that are moved by {NUDGE:g} at most; a limit in nats is widened by two of its "
        f"standard errors, {done.chance:.4f}."
    )


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
        "batch": done.batch,
        "sequence": done.sequence,
        "seeds": done.seeds,
        "accepted": done.accepted,
    }
    return {**setting, "rows": [dataclasses.asdict(row) for row in done.rows()], "runs": runs}
