"""What the library must reach on an H200, judged from the figures of a run.

A target asks for the figures of a section whose subject and column match, and for the worst of them. On other cards
the figures are shown and nothing is judged.
"""

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measuring.figure import DECIMALS, Figure, Result, Target, at_least, at_most

#: The card that the targets are for.
CARD = "NVIDIA H200"
COLUMNS = ("target", "wanted", "reached", "verdict")


class Goal(NamedTuple):
    """A row."""

    what: str
    section: str
    #: Patterns of fnmatch, for the figures that count: of the subject, several separated by " or ".
    subject: str
    column: str
    target: Target


class Row(NamedTuple):
    """A goal with what was found."""

    what: str
    target: Target
    reached: str
    verdict: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, str(self.target), self.reached, self.verdict


#: Recipes whose GEMMs an H200 has.
NATIVE = "tensorwise * or delayed * or rowwise * or blockwise *"
SHAPE = "8192, 4096 → 4096"
GOALS = (
    *(
        Goal(f"Linear {SHAPE}, {name}, over bf16", "linears", f"{SHAPE}: quaver {name}", "changing, speed-up", wanted)
        for name, wanted in {
            "tensorwise": at_least(1.5),
            "delayed": at_least(1.6),
            "rowwise": at_least(1.45),
            "blockwise": at_least(1.4),
        }.items()
    ),
    Goal("Quantization kernels, of the copy rate, the slowest", "kernels", NATIVE, "of the floor", at_least(90)),
    Goal("Kernels that differ from the reference", "kernels", "*", "differing", Target(0, 0)),
    Goal("Kernels of norms and activations that differ", "producers", "*", "differing", Target(0, 0)),
    Goal("Kernels of norms and activations, from float64", "producers", "*", "error", at_most(1)),
    Goal("Linear tensorwise over torchao compiled, worst shape", "linears", "*", "over torchao compiled", at_least(1)),
    Goal("Linear tensorwise over torchao eager, worst shape", "linears", "*", "over torchao eager", at_least(1.3)),
    Goal("Llama-8B layer, delayed, over bf16", "layer", "quaver delayed", "speed-up", at_least(1.45)),
    Goal("Host time of Linear forward over nn.Linear", "host", "quaver tensorwise", "forward, ratio", at_most(1.5)),
    Goal("Captured training steps that differ from eager ones", "graph", "*", "differing", Target(0, 0)),
)


def judge(done: Sequence[Result], card: str) -> list[Row]:
    """A row for each goal."""
    return [row(goal, done, card) for goal in GOALS]


def row(goal: Goal, done: Sequence[Result], card: str) -> Row:
    judged = [
        figure
        for result in done
        if result.case.name == goal.section
        for figure in result.figures
        if figure.column == goal.column
        and any(fnmatch.fnmatch(figure.subject, pattern) for pattern in goal.subject.split(" or "))
    ]
    if not judged:
        return Row(goal.what, goal.target, "", "not measured")
    least = min if goal.target.high == float("inf") else max
    worst: Figure = least(judged, key=lambda figure: figure.value)
    shown = f"{worst.value:.{DECIMALS[worst.unit]}f} {worst.unit}"
    # A figure that is no number meets nothing.
    verdict = "pass" if all(goal.target.met(figure.value) for figure in judged) else "missed"
    return Row(goal.what, goal.target, shown, verdict if card == CARD else "not judged on this card")
