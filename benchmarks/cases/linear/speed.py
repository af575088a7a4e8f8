"""Forward and backward through one linear layer, as a ratio of nn.Linear's time."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import Step, Timing, interleave
from benchmarks.subjects import linears, peer
from quaver.recipes import RECIPES

UNCHANGED, CHANGES = "weight unchanged", "weight changes"
QUANTIZING = [name for name, build in RECIPES.items() if build().quantizes]
NOTES = (
    "Eager, without bias, interleaved; the median of each round's ratio. Entering autocast "
    "is part of our step. `weight unchanged` may use the quantized weight again and its gradient adds up, as in "
    "micro-batches; `weight changes` raises the weight's version after every step (about a microsecond, left in). "
    "torchao quantizes it every time."
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes and targets of a case."""

    features: int
    dtype: torch.dtype
    rounds: int
    steps: int
    # Highest ratios by recipe: weight unchanged, weight changing (None: not judged).
    targets: Mapping[str, tuple[float, float | None]]
    # Recipes to time.
    recipes: list[str]
    # Size and rounds when quick.
    quick: tuple[int, int]

    def measure(self, quick: bool) -> list[Figure]:
        features, rounds = self.quick if quick else (self.features, self.rounds)
        timings = interleave(subjects(features, self.dtype, self.recipes), rounds=rounds, steps=self.steps)
        judged = features == self.features
        return [f for name, timing in timings.items() for f in self.figures(name, timing, judged)]

    def figures(self, name: str, timing: Timing, judged: bool) -> list[Figure]:
        subject, _, column = name.partition(", ")
        unit, scale = ("µs", 1e6) if self.features < 256 else ("ms", 1e3)
        ratio = Figure(subject, column, timing.ratio, "x", self.target(subject, column) if judged else None)
        time = Figure(subject, "time" if column == UNCHANGED else "time, changes", timing.seconds * scale, unit)
        return [ratio, time]

    def target(self, subject: str, column: str) -> Target | None:
        highest = self.targets.get(subject.removeprefix("quaver "), (None, None))[column == CHANGES]
        return None if highest is None else at_most(highest)


def subjects(features: int, dtype: torch.dtype, recipes: list[str]) -> dict[str, Step]:
    """Return the steps by "subject, column", nn.Linear first."""
    base = linears.linear(features, dtype)
    x = torch.randn(features, features, dtype=dtype, requires_grad=True)
    g = torch.randn(features, features, dtype=dtype)
    steps = {f"nn.Linear, {UNCHANGED}": step_of(base, x, g, accumulating=True)}
    for recipe in peer.RECIPES:
        steps[f"torchao {recipe}, {UNCHANGED}"] = step_of(linears.torchao(base, recipe), x, g, accumulating=True)
    for name in recipes:
        layer = linears.ours(base)
        for column, changing in ((UNCHANGED, False), (CHANGES, True)):
            steps[f"quaver {name}, {column}"] = step_of(
                layer, x, g, RECIPES[name](), changing=changing, accumulating=True
            )
    return steps


def _all(ratio: float, recipes: list[str]) -> dict[str, tuple[float, float | None]]:
    return dict.fromkeys(recipes, (ratio, ratio))


FP8 = [name for name in QUANTIZING if name not in ("nvfp4", "mxfp4", "mxfp6")]
SMALL = ["tensorwise", "delayed"]

SMALL_BF16 = Case(
    name="small-bf16",
    title="Linear forward + backward, 32³, bf16, against nn.Linear",
    notes=NOTES,
    measure=Setup(
        features=32,
        dtype=torch.bfloat16,
        rounds=60,
        steps=50,
        targets={"tensorwise": (1.7, 1.9), "delayed": (2.1, 2.4)},
        recipes=SMALL,
        quick=(32, 2),
    ).measure,
)
SMALL_FLOAT32 = Case(
    name="small-float32",
    title="Linear forward + backward, 32³, float32, against nn.Linear",
    notes=NOTES,
    measure=Setup(
        features=32,
        dtype=torch.float32,
        rounds=60,
        steps=50,
        targets={"tensorwise": (3.6, None), "delayed": (4.6, None)},
        recipes=SMALL,
        quick=(32, 2),
    ).measure,
)
LARGE_BF16 = Case(
    name="large-bf16",
    title="Linear forward + backward, 1024³, bf16, against nn.Linear",
    notes=NOTES,
    measure=Setup(
        features=1024,
        dtype=torch.bfloat16,
        rounds=9,
        steps=1,
        targets=_all(1.8, FP8),
        recipes=QUANTIZING,
        quick=(128, 2),
    ).measure,
)
LARGE_FLOAT32 = Case(
    name="large-float32",
    title="Linear forward + backward, 2048³, float32, against nn.Linear",
    notes=NOTES,
    measure=Setup(
        features=2048,
        dtype=torch.float32,
        rounds=3,
        steps=1,
        targets=_all(1.3, FP8),
        recipes=FP8,
        quick=(128, 2),
    ).measure,
    of_threads=True,
)
