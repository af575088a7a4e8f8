"""What a case measures: figures, each with a target or none, and the case that yields them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Decimals that a unit is shown with.
DECIMALS = {"x": 2, "%": 1, "dB": 1, "s": 2, "ms": 2, "µs": 1, "MiB": 2, "GEMMs": 0, "modules": 0} | {
    "TB/s": 2,
    "TFLOP/s": 0,
    "GiB": 2,
    "elements": 0,
    "ppm": 3,
    "nats": 4,
    "tokens/s": 0,
}


class NotMeasurable(Exception):
    """This machine cannot measure what the case asks; the message says why."""

    def __init__(self, reason: str, figures: "Sequence[Figure]" = ()) -> None:
        super().__init__(reason)
        #: What it measured all the same, to be shown and not judged.
        self.figures = tuple(figures)


@dataclass(frozen=True)
class Target:
    """The closed interval that a figure must lie in."""

    low: float = -math.inf
    high: float = math.inf

    def met(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return f"= {self.low:g}"
        if math.isinf(self.low):
            return f"≤ {self.high:g}"
        return f"≥ {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


def at_most(value: float) -> Target:
    return Target(high=value)


def at_least(value: float) -> Target:
    return Target(low=value)


def within(middle: float, distance: float) -> Target:
    return Target(round(middle - distance, 6), round(middle + distance, 6))


def exactly(value: float) -> Target:
    return Target(value, value)


@dataclass(frozen=True)
class Figure:
    """One cell of a case's table."""

    #: The row: whose figure it is.
    subject: str
    #: The column: what was measured.
    column: str
    value: float
    #: A key of DECIMALS.
    unit: str
    target: Target | None = None
    #: Why there is no number, which is shown in its place, or "".
    instead: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.target.met(self.value)

    @property
    def mark(self) -> str:
        return {None: "", True: "PASS", False: "MISS"}[self.passed]

    def __str__(self) -> str:
        if self.instead:
            return self.instead
        shown = f"{self.value:.{DECIMALS[self.unit]}f} {self.unit}"
        return shown if self.target is None else f"{shown} ({self.target}) {self.mark}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, answered by a table of figures."""

    #: As `--only` takes it.
    name: str
    title: str
    #: How it is measured, and what one must know to read it.
    notes: str
    #: Called with whether to be quick: small sizes or few rounds, and no target where that changes what it is about.
    #: Of a generator each row is told as it ends. Raises NotMeasurable.
    measure: Callable[[bool], Iterable[Figure]]
    #: Whether its targets are for several threads of torch, too.
    of_threads: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case gave on this machine."""

    case: Case
    figures: tuple[Figure, ...]
    seconds: float
    #: Why there are no figures, or why they are not judged, or "".
    reason: str = ""
    #: Of a section of several cases, those that gave figures.
    cases: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(figure.column for figure in self.figures))

    def rows(self) -> list[tuple[str, list[Figure | None]]]:
        """Subjects with their figures in the order of `columns`."""
        cells = {(figure.subject, figure.column): figure for figure in self.figures}
        subjects = dict.fromkeys(figure.subject for figure in self.figures)
        return [(subject, [cells.get((subject, column)) for column in self.columns]) for subject in subjects]
