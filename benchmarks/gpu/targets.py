"""Targets for an H200 and an H100, judged from the figures of a run.

A target applies to the worst figure of a section whose subject and column match. Targets are ratios. A recipe gains
less over bf16 on an H100, which has slower memory and the same GEMMs: its targets are the H200's times the ratio of the
ledger's predictions. On other GPUs figures are shown and not judged.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.measuring.figure import DECIMALS, Figure, Result, Target, at_least, at_most

#: The cards that the targets are for, as their drivers name them; where a goal names no other, the first one's holds.
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
CARDS = (H200, H100)
COLUMNS = ("target", "wanted", "reached", "verdict")


class Goal(NamedTuple):
    """A target of a section's rows."""

    what: str
    section: str
    #: Patterns of fnmatch, for the figures that count: of the subject, several separated by " or ".
    subject: str
    column: str
    target: Target
    #: Other targets by GPU.
    others: Mapping[str, Target] = {}

    def on(self, card: str) -> Target:
        return self.others.get(card, self.target)


class Row(NamedTuple):
    """A goal and the measured figure."""

    what: str
    target: Target
    reached: str
    verdict: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.what, str(self.target), self.reached, self.verdict


#: Recipes whose GEMMs an H200 has.
NATIVE = ("tensorwise", "delayed", "rowwise", "blockwise")
#: Shape of operands that are large enough to time a kernel.
LARGE = "16384 x 8192"
SHAPE = "8192, 4096 → 4096"
#: Over bf16 on either card.
LINEAR = {
    "tensorwise": (1.5, 1.40),
    "delayed": (1.6, 1.52),
    "rowwise": (1.45, 1.35),
    "blockwise": (1.4, 1.34),
}
#: Emulated, where bf16 is 1.
EMULATED = ("mxfp8", "nvfp4")
EXPERTS = at_least(1.4), {H100: at_least(1.28)}
LLAMA = at_least(1.45), {H100: at_least(1.38)}
GOALS = (
    *(
        Goal(
            f"Linear {SHAPE}, {name}, over bf16",
            "linears",
            f"{SHAPE}: quaver {name}",
            "changing, speed-up",
            at_least(of_h200),
            {H100: at_least(of_h100)},
        )
        for name, (of_h200, of_h100) in LINEAR.items()
    ),
    Goal(
        "Quantization kernels, of the copy rate, the slowest",
        "kernels",
        " or ".join(f"{name} *, {LARGE}" for name in NATIVE),
        "of the floor",
        at_least(90),
    ),
    Goal("Kernels that differ from the reference", "kernels", "*", "differing", Target(0, 0)),
    Goal("Kernels of norms and activations that differ", "producers", "*", "differing", Target(0, 0)),
    Goal("Kernels of norms and activations, from float64", "producers", "*", "error", at_most(1)),
    Goal("Linear tensorwise over torchao compiled, worst shape", "linears", "*", "over torchao compiled", at_least(1)),
    Goal("Linear tensorwise over torchao eager, worst shape", "linears", "*", "over torchao eager", at_least(1.3)),
    *(
        Goal(
            f"Linear 4096, 4096 → 4096, {name} emulated, over bf16",
            "linears",
            f"4096, 4096 → 4096: quaver {name}",
            "changing, speed-up",
            at_least(0.67),
        )
        for name in EMULATED
    ),
    Goal("GroupedLinear of 8 experts, rowwise, over bf16", "experts", "rowwise", "speed-up", *EXPERTS),
    Goal("GroupedLinear with an empty expert, wrong elements", "experts", "*", "wrong", Target(0, 0)),
    Goal("Llama-8B layer, delayed, over bf16", "layer", "quaver delayed", "speed-up", *LLAMA),
    Goal("Host time of Linear forward over nn.Linear", "host", "quaver tensorwise", "forward, ratio", at_most(1.5)),
    Goal("Captured training steps that differ from eager ones", "graph", "*", "differing", Target(0, 0)),
)


def judge(done: Sequence[Result], card: str) -> list[Row]:
    """Return a row for each goal."""
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
    target = goal.on(card)
    if not judged:
        return Row(goal.what, target, "", "not measured")
    least = min if target.high == float("inf") else max
    worst: Figure = least(judged, key=lambda figure: figure.value)
    shown = f"{worst.value:.{DECIMALS[worst.unit]}f} {worst.unit}"
    # NaN meets no target.
    verdict = "pass" if all(target.met(figure.value) for figure in judged) else "missed"
    return Row(goal.what, target, shown, verdict if card in CARDS else "not judged on this card")
