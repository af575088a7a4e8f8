"""Table of paired runs: differences from the first row, standard errors, and verdicts."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.acceptance.training import CONTROL, CONTROLS, NARROW, NUDGE, NULL, Outcome
from benchmarks.measuring import results
from quaver.comparison.results import paired

BASELINE = "bf16"
#: Column of models with experts.
CHOICES = "choices unlike bf16's, %"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Requirement for the absolute mean difference: below a limit, or above it."""

    limit: float
    # The limit is a fraction of bf16's loss, not nats.
    relative: bool = False
    # The difference must be larger, and a run that fails is far enough off.
    above: bool = False

    def holds(self, difference: float, baseline: float, chance: float = 0.0) -> bool:
        """Return True if a mean difference fulfils the rule.

        Args:
            chance: two standard errors of the null model's difference, which are added to a limit in nats.
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
#: Rules for models with experts or state spaces.
BLOCKS: Mapping[str, Rule] = {NARROW if name == CONTROL else name: rule for name, rule in LAYERS.items()}
RULES: Mapping[str, Rule] = {**LAYERS, **ATTENTION, **BLOCKS}


#: A condition on all rows together: whether it holds, and that as a sentence.
Verdict = Callable[["Acceptance"], tuple[bool, str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe over all seeds."""

    recipe: str
    # Mean validation loss of the runs that did not fail.
    loss: float | None
    # Differences from the first row by seed, their mean, and its standard error.
    differences: tuple[float, ...]
    difference: float | None
    error: float | None
    accepted: bool
    # Smallest and largest over layers and seeds; None for bf16.
    weight_errors: tuple[float, float] | None
    failures: tuple[str, ...]
    # Mean over seeds of the share of choices of experts that the same weights do not make under bf16.
    choices_differ: float | None = None
    # Differences from the row of `Acceptance.also`.
    also: tuple[float, ...] = ()
    # Share of clamped updates; None where none are counted.
    clamped: float | None = None


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """All runs, by row and seed."""

    steps: int
    seeds: int
    first: int = 0
    model: str
    # The text, in words.
    text: str
    # Rows; all are compared with the first.
    recipes: tuple[str, ...]
    rules: Mapping[str, Rule] = field(default_factory=lambda: RULES)
    # Rows that are compared with another one too.
    also: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict | None = None
    framework: str = "torch"
    batch: int = 8
    sequence: int = 128
    outcomes: Mapping[tuple[str, int], Outcome]

    @property
    def numbers(self) -> range:
        """Return the seeds."""
        return range(self.first, self.first + self.seeds)

    @property
    def accepted(self) -> bool:
        return all(row.accepted for row in self.rows()) and (self.verdict is None or self.verdict(self)[0])

    def losses(self, recipe: str) -> dict[int, float]:
        """Return the losses by seed, without failed runs."""
        by_seed = {seed: self.outcomes[recipe, seed].loss for seed in self.numbers}
        return {seed: loss for seed, loss in by_seed.items() if loss is not None}

    def differences(self, recipe: str, other: str) -> tuple[float, ...]:
        """Return a row's losses minus another row's, by seed."""
        own, base = self.losses(recipe), self.losses(other)
        return tuple(own[seed] - base[seed] for seed in own if seed in base)

    @property
    def chance(self) -> float:
        """Two standard errors of the null model's differences from the first row; 0 where none was trained."""
        return 2 * (paired(self.differences(NULL, self.recipes[0]))[1] or 0.0) if NULL in self.recipes else 0.0

    def rows(self) -> list[Row]:
        return [self.row(recipe) for recipe in self.recipes]

    def row(self, recipe: str) -> Row:
        own, base = self.losses(recipe), self.losses(self.recipes[0])
        outcomes = [self.outcomes[recipe, seed] for seed in self.numbers]
        failures = tuple(outcome.failure for outcome in outcomes if outcome.failure)
        differences = () if recipe == self.recipes[0] else self.differences(recipe, self.recipes[0])
        mean, error = paired(differences)
        rule = self.rules.get(recipe)
        if failures or rule is None:
            accepted = not failures or (rule is not None and rule.above)
        else:
            accepted = mean is not None and rule.holds(mean, statistics.fmean(base.values()), self.chance)
        weights = [error for outcome in outcomes for error in outcome.weight_errors.values()]
        counted = [outcome.choices_differ for outcome in outcomes if outcome.choices_differ is not None]
        updates = sum(outcome.updates for outcome in outcomes)
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
            also=self.differences(recipe, self.also[recipe]) if recipe in self.also else (),
            clamped=sum(outcome.clamped for outcome in outcomes) / updates if updates else None,
        )

    def cells(self, row: Row) -> dict[str, str]:
        """Return a row as text, by column."""
        rule = self.rules.get(row.recipe)
        other = next(iter(self.also.values()), "")
        share = row.clamped
        return {
            "recipe": row.recipe,
            "validation loss": "" if row.loss is None else f"{row.loss:.4f}",
            f"minus {self.recipes[0]} ± std. error": mean_of(row.differences),
            "by seed": by_seed(row.differences),
            f"minus {other} alone ± std. error": mean_of(row.also),
            "by seed, of that": by_seed(row.also),
            "rule": str(rule or ""),
            "verdict": ("PASS" if rule else "") if row.accepted else "FAIL",
            "weight error, %": ""
            if row.weight_errors is None
            else "{:.2f} to {:.2f}".format(*(100 * e for e in row.weight_errors)),
            CHOICES: "" if row.choices_differ is None else f"{100 * row.choices_differ:.2f}",
            "clamped updates": "" if share is None else f"{share:.1e}" if share else "0",
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the non-empty columns, and the cells."""
        lines = [self.cells(row) for row in self.rows()]
        columns = [column for column in lines[0] if any(line[column] for line in lines)]
        return columns, [[line[column] for column in columns] for line in lines]


def mean_of(differences: tuple[float, ...]) -> str:
    """Return the mean and its standard error."""
    mean, error = paired(differences)
    return "" if mean is None else f"{mean:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def by_seed(differences: tuple[float, ...]) -> str:
    return " ".join(f"{difference:+.4f}" for difference in differences)


def rich_table(done: Acceptance) -> Table:
    shown = Table(title="Final validation loss, nats a token", title_justify="left")
    columns, lines = done.table()
    for column in columns:
        shown.add_column(column, justify="left" if column == "recipe" else "right")
    for row, line in zip(done.rows(), lines, strict=True):
        shown.add_row(*line, style="" if row.accepted else "bold red")
    return shown


def markdown(done: Acceptance) -> list[str]:
    rows = done.rows()
    failures = [f"\n{row.recipe} failed: {failure}" for row in rows for failure in row.failures]
    return [
        "# Training runs that a release is accepted by",
        "",
        f"Framework {done.framework}, {setting(done)}; the same initial weights and batches in every row, embedding "
        "and head in bf16. Nats a token.",
        "",
        *results.table(*done.table()),
        *failures,
        "",
        explained(done),
    ]


def setting(done: Acceptance) -> str:
    """Model, steps, seeds and text, in words."""
    return (
        f"model `{done.model}`, {done.steps} steps of {done.batch} x {done.sequence} tokens, seeds {done.first} to "
        f"{done.numbers[-1]}, text: {done.text}"
    )


def explained(done: Acceptance) -> str:
    """Return the verdict and an explanation of the table."""
    sentences = ["Accepted." if done.accepted else "**Not accepted.**"]
    if done.verdict is not None:
        sentences.append(done.verdict(done)[1])
    sentences.append("A difference is paired by seed: its mean over seeds, and that mean's standard error (n - 1).")
    if NULL in done.recipes:
        sentences.append(
            f"`{NULL}` is the first row from weights that are moved by {NUDGE:g} at most; a limit in nats is widened "
            f"by two of its standard errors, {done.chance:.4f}."
        )
    control = next((recipe for recipe in done.recipes if recipe in CONTROLS), None)
    if control:
        sentences.append(f"`{control}` has every scale at 1 and must be off: this shows that the comparison can fail.")
    if any(row.weight_errors for row in done.rows()):
        sentences.append(
            "The weight error is the relative RMS of dequantize(quantize(w)) - w: the smallest and the largest of all "
            "converted layers, each of which was checked not to be zero; so was the error of each layer's attention "
            "where the recipe quantizes it."
        )
    return " ".join(sentences)


def data(done: Acceptance) -> dict[str, Any]:
    own = ("framework", "model", "text", "steps", "batch", "sequence", "first", "seeds", "accepted")
    runs = [
        {"recipe": recipe, "seed": seed, **dataclasses.asdict(outcome)}
        for (recipe, seed), outcome in done.outcomes.items()
    ]
    rows = [dataclasses.asdict(row) for row in done.rows()]
    return {**{name: getattr(done, name) for name in own}, "rows": rows, "runs": runs}
