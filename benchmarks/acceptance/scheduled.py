"""`python -m benchmarks accept-schedule`: does a run that ends in bf16 end nearer bf16 than its recipe alone?

Paired by seed: a seed's runs have the same initial weights and batches. A schedule's run is its first recipe's, bit for
bit, until it changes, and goes on from that one's checkpoint here, which tests/train/test_switching.py holds to
be the same.

Beside it null models, from weights that are moved by 1e-5 at most, which say what chance alone does: to bf16 from the
beginning, and to the recipe alone where the schedule changes. The second one is what the schedule is judged against:
both have the first recipe's run behind them, and differ by what follows.

The rule is one of means, since single seeds scatter: the mean by which the schedule ends nearer must be 2 of its
standard errors or more, and above the magnitude of the null model's mean shift and 2 of its standard errors together.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.command import checksum, train_all
from benchmarks.acceptance.report import BASELINE
from benchmarks.acceptance.training import NUDGE, Outcome, Run, read
from benchmarks.measuring import machine, results
from quaver.train import config
from quaver.train.compare import paired

APART = "± std. error"
COLUMNS = ("run", "validation loss", f"minus bf16 {APART}", "by seed", f"minus the recipe alone {APART}", "by seed")


class Kind(NamedTuple):
    """One run of each seed."""

    recipe: str
    #: Whether it goes on from the recipe alone where the schedule changes.
    late: bool = False
    nudged: bool = False

    def __str__(self) -> str:
        return self.recipe + (f", weights ± {NUDGE:g} {'at the change' if self.late else 'at first'}" * self.nudged)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared."""

    steps: int = 300
    # How many, from the first on; standard errors ask for two.
    seeds: int = 3
    first: int = 0
    model: str = "tiny"
    # Of text files and folders; none is the default text.
    text: tuple[str, ...] = ()
    recipe: str = "nvfp4"
    schedule: str = "nvfp4 until 85%, bf16"
    # Where runs are kept.
    folder: Path = Path("runs/accept")

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds is {self.seeds}, of which there is no standard error; give 2 or more")

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first, self.first + self.seeds)

    @property
    def baseline(self) -> Kind:
        return Kind(BASELINE)

    @property
    def alone(self) -> Kind:
        return Kind(self.recipe)

    @property
    def scheduled(self) -> Kind:
        return Kind(self.schedule, late=True)

    @property
    def null(self) -> Kind:
        """What the schedule is judged against."""
        return Kind(self.recipe, late=True, nudged=True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.baseline, self.alone, self.scheduled, Kind(BASELINE, nudged=True), self.null

    @property
    def change(self) -> int:
        """The last step under the schedule's first recipe. Raises: ValueError if that is not known before a run."""
        end = config.parse_phases(self.schedule)[0].end
        last = None if end is None else end.last(self.steps)
        if not last:
            raise ValueError(f"{self.schedule!r} does not say after which of {self.steps} steps it changes; give more")
        return last

    def runs(self) -> dict[tuple[Kind, int], Run]:
        """By kind and seed."""
        folder = self.folder.resolve() / f"torch-{self.model}-{self.steps}-{checksum()}"

        def place(kind: Kind, seed: int) -> str:
            how = "-nudged" * kind.nudged + "-late" * (kind.late and kind.nudged)
            return str(folder / f"{config.folder_name(kind.recipe)}{how}-seed{seed}")

        return {
            (kind, seed): Run(
                recipe=kind.recipe,
                seed=seed,
                steps=self.steps,
                model=self.model,
                text=self.text,
                folder=place(kind, seed),
                nudge=NUDGE * kind.nudged,
                keep=self.change * (kind == self.alone),
                after=place(self.alone, seed) if kind.late else "",
            )
            for seed in self.numbers
            for kind in self.kinds
        }


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """All runs, by kind and seed."""

    plan: Plan
    outcomes: Mapping[tuple[Kind, int], Outcome]

    def losses(self, kind: Kind) -> list[float]:
        """By seed. Raises: ValueError if a run failed."""
        outcomes = [self.outcomes[kind, seed] for seed in self.plan.numbers]
        for seed, outcome in zip(self.plan.numbers, outcomes, strict=True):
            if outcome.loss is None:
                raise ValueError(f"{kind} with seed {seed} failed: {outcome.failure}")
        return [outcome.loss for outcome in outcomes if outcome.loss is not None]

    def apart(self, kind: Kind, other: Kind) -> list[float]:
        """A run's losses less another one's, by seed."""
        return [a - b for a, b in zip(self.losses(kind), self.losses(other), strict=True)]

    @property
    def nearer(self) -> list[float]:
        """By how much the schedule's runs end nearer bf16 than those of its recipe alone, by seed."""
        plan = self.plan
        alone, scheduled = (self.apart(kind, plan.baseline) for kind in (plan.alone, plan.scheduled))
        return [abs(a) - abs(s) for a, s in zip(alone, scheduled, strict=True)]

    @property
    def chance(self) -> float:
        """What the null model of the recipe is off by in the mean, and 2 standard errors of that."""
        mean, error = of(self.apart(self.plan.null, self.plan.alone))
        return abs(mean) + 2 * error

    @property
    def accepted(self) -> bool:
        """Nearer in the mean by 2 standard errors or more, and by more than chance."""
        mean, error = of(self.nearer)
        return mean >= 2 * error and mean > self.chance

    def cells(self, kind: Kind) -> tuple[str, ...]:
        """A row of the table."""
        plan, loss = self.plan, f"{statistics.fmean(self.losses(kind)):.4f}"
        of_bf16 = [] if kind == plan.baseline else self.apart(kind, plan.baseline)
        return str(kind), loss, *said(of_bf16), *said(self.apart(kind, plan.alone) if kind.late else [])

    def table(self) -> list[tuple[str, ...]]:
        return [self.cells(kind) for kind in self.plan.kinds]

    def verdict(self) -> str:
        mean, by_seed = said(self.nearer)
        alone = self.plan.recipe
        return (
            f"{'Accepted' if self.accepted else 'Not accepted'}: `{self.plan.schedule}` ends nearer bf16 than "
            f"`{alone}` by {mean} nats (by seed {by_seed}). Rule: in the mean by 2 standard errors, and by more than "
            f"the null model of `{alone}` is off in the mean and 2 of its standard errors, {self.chance:.4f}."
        )


def of(differences: list[float]) -> tuple[float, float]:
    """Their mean and its standard error."""
    mean, error = paired(differences)
    assert mean is not None and error is not None
    return mean, error


def said(differences: list[float]) -> tuple[str, str]:
    """Mean with its standard error, and each seed's."""
    mean, error = paired(differences)
    if mean is None:
        return "", ""
    return f"{mean:+.4f}" + ("" if error is None else f" ± {error:.4f}"), " ".join(f"{d:+.4f}" for d in differences)


def accept(plan: Plan, jobs: int, console: Console, folder: Path = results.FOLDER) -> Scheduled:
    """Train what is not trained yet, print the verdict and write it to `folder`. Raises: ValueError if a run failed."""
    runs = plan.runs()
    for late in (False, True):
        train_all([run for (kind, _), run in runs.items() if kind.late is late], jobs, console)
    done = Scheduled(plan=plan, outcomes={key: Outcome(**read(run.result)) for key, run in runs.items()})
    shown = Table(*COLUMNS, title="Final validation loss, nats a token", title_justify="left")
    for row in done.table():
        shown.add_row(*row)
    console.print(shown)
    console.print(done.verdict(), highlight=False)
    for path in results.write(folder, name_of(done.plan), machine.describe(), markdown(done), data(done)):
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return done


def name_of(plan: Plan) -> str:
    """What the results are written as; later seeds do not replace the first ones."""
    return f"accept-schedule-from-seed-{plan.first}" if plan.first else "accept-schedule"


def markdown(done: Scheduled) -> list[str]:
    plan = done.plan
    text = " ".join(plan.text) or "the standard library of this Python"
    return [
        "# A run that ends in bf16",
        "",
        f"`python -m benchmarks accept-schedule`: model `{plan.model}`, {plan.steps} steps, seeds {plan.first} to "
        f"{plan.numbers[-1]}, text: {text}; the same initial weights and batches in every run of a seed. The recipe "
        f"changes after step {plan.change}. Nats a token.",
        "",
        *results.table(COLUMNS, done.table()),
        "",
        done.verdict(),
    ]


def data(done: Scheduled) -> dict[str, Any]:
    runs = [
        {"run": str(kind), "seed": seed, "loss": outcome.loss, "seconds": outcome.seconds}
        for (kind, seed), outcome in done.outcomes.items()
    ]
    plan = dataclasses.asdict(done.plan) | {"folder": ""}
    return {**plan, "accepted": done.accepted, "nearer": done.nearer, "chance": done.chance, "runs": runs}
