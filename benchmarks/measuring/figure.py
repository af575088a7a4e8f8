"""Cases and the figures that they yield, each with a target or none."""

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
    """This machine cannot measure a case; the message says why."""

    def __init__(self, reason: str, figures: "Sequence[Figure]" = ()) -> None:
        super().__init__(reason)
        #: Figures that were measured nevertheless; they are shown but not judged.
        self.figures = tuple(figures)


@dataclass(frozen=True)
class Target:
    """Closed interval of accepted values."""

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

    #: Name of the row.
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
        """True if the target is met; None without one."""
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
    """A benchmark with one table of figures."""

    #: Name for `--only`.
    name: str
    title: str
    #: How it is measured, and how to read it.
    notes: str
    #: Function of `quick`, True for small sizes or few rounds, without targets that need full sizes. Rows of a
    #: generator are reported one by one. Raises NotMeasurable.
    measure: Callable[[bool], Iterable[Figure]]
    #: True if its targets also hold for several threads of torch.
    of_threads: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a case on this machine."""

    case: Case
    figures: tuple[Figure, ...]
    seconds: float
    #: Why there are no figures, or why they are not judged, or "".
    reason: str = ""
    #: For a section of several cases, those with figures.
    cases: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(figure.column for figure in self.figures))

    def rows(self) -> list[tuple[str, list[Figure | None]]]:
        """Subjects with their figures in the order of `columns`."""
        cells = {(figure.subject, figure.column): figure for figure in self.figures}
        subjects = dict.fromkeys(figure.subject for figure in self.figures)
        return [(subject, [cells.get((subject, column)) for column in self.columns]) for subject in subjects]
