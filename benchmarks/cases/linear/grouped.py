"""Grouped products over a loop of linear layers and over torch's grouped GEMM, and bytes saved for backward."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.measuring.memory import kept_bytes
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import interleave
from quaver.recipes import RECIPES

#: Targets: each recipe's time over its loop, the median of these, time over torch's, and % of bf16's bytes.
EACH, MEDIAN, OF_TORCH, BYTES = at_most(1.0), at_most(0.9), at_most(1.1), at_most(52.0)
#: Recipes whose backward reads the input in eight or four bits.
SAVING = [name for name, build in RECIPES.items() if build().wgrad.b is not None]
LOOP, TORCH = "a Linear a group", "torch's grouped_mm"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of a case. Tokens are distributed by Zipf's law, with none in the last group, unless `given`."""

    tokens: int
    inputs: int
    outputs: int
    groups: int
    rounds: int
    #: Tokens of each group.
    given: tuple[int, ...] = ()
    #: True if the median, and the bytes, have a target: GEMMs of many tokens take as long as a loop, and scales of few
    #: tokens are as large as their codes.
    shares: bool = False
    fits: bool = False

    def sizes(self) -> list[int]:
        if self.given:
            return list(self.given)
        shares = [0.0 if group == self.groups - 1 else 1 / (group + 2) for group in range(self.groups)]
        sizes = [int(self.tokens * share / sum(shares)) for share in shares]
        sizes[0] += self.tokens - sum(sizes)
        return sizes

    def measure(self, quick: bool) -> Iterator[Figure]:
        of = Setup(tokens=64, inputs=32, outputs=48, groups=4, rounds=1) if quick else self
        judged = of is self
        torch.manual_seed(0)
        x = torch.randn(of.tokens, of.inputs, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(of.tokens, of.outputs, dtype=torch.bfloat16)
        sizes = of.sizes()
        offsets = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
        ratios, plain = [], 0
        for name in ("bf16", *(name for name in RECIPES if name != "bf16")):
            layer, each = of.pair(name)

            def together(x: Tensor, layer: nn.Module = layer) -> Tensor:
                y: Tensor = layer(x, offsets)
                return y

            def one_by_one(x: Tensor, each: nn.ModuleList = each) -> Tensor:
                parts = [linear(part) for linear, part in zip(each, x.split(sizes), strict=True) if len(part)]
                return torch.cat(parts)

            ours = step_of(together, x, g, changing=True, parameters=layer.parameters())
            steps = {LOOP: step_of(one_by_one, x, g, changing=True, parameters=each.parameters()), "ours": ours}
            timing = interleave(steps, rounds=of.rounds, steps=1)["ours"]
            ratios.append(timing.ratio)
            subject = f"quaver {name}"
            yield Figure(subject, f"of {LOOP}", timing.ratio, "x", EACH if judged else None)
            if name == "bf16":
                weight = layer.weight.detach().transpose(1, 2).requires_grad_()  # type: ignore[operator]

                def theirs(x: Tensor, weight: Tensor = weight) -> Tensor:
                    return grouped_mm(x, weight, offs=offsets)

                steps = {TORCH: step_of(theirs, x, g, changing=True, parameters=[weight]), "ours": ours}
                torch_ratio = interleave(steps, rounds=of.rounds, steps=1)["ours"].ratio
                yield Figure(subject, f"of {TORCH}", torch_ratio, "x", OF_TORCH if judged else None)
            yield Figure(subject, "time", timing.seconds * 1e3, "ms")
            saved = kept_bytes(together, x)
            plain = plain or saved
            target: Target | None = BYTES if of.fits and name in SAVING else None
            yield Figure(subject, "kept, of bf16", 100 * saved / plain, "%", target)
        middle = statistics.median(ratios)
        yield Figure("the median of recipes", f"of {LOOP}", middle, "x", MEDIAN if of.shares else None)

    def pair(self, recipe: str) -> tuple[nn.Module, nn.ModuleList]:
        """Return a layer of all groups, and one layer per group with the same weights."""
        how = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe}
        layer = qt.GroupedLinear(self.groups, self.inputs, self.outputs, **how)  # type: ignore[arg-type]
        each = nn.ModuleList([qt.Linear(self.inputs, self.outputs, **how) for _ in range(self.groups)])  # type: ignore[arg-type]
        for linear, weight in zip(each, layer.weight.detach(), strict=True):
            linear.set_weight(weight)  # type: ignore[operator]
        return layer, each


ZIPF = "as 1/2, 1/3, 1/4 and so on, the last one without"


def _case(name: str, setup: Setup) -> Case:
    size = f"{setup.groups} groups of {setup.tokens} tokens, {setup.inputs} → {setup.outputs}"
    shares = ", ".join(map(str, setup.given)) or ZIPF
    return Case(
        name=name,
        title=f"{size}, bf16: one layer of all groups",
        notes=(
            f"Forward and backward, eager, without bias; tokens of groups {shares}. "
            "`qt.GroupedLinear` over a loop of one `qt.Linear` a group with `torch.cat` behind, and of bf16 "
            "over `torch.nn.functional.grouped_mm`, by turns, the median of each round's ratio. Weights change from "
            "step to step. Each storage saved for backward counts once, with its scales, parameters apart."
        ),
        measure=setup.measure,
    )


#: Sizes for the layer's targets: 64 tokens per group on average, drawn uniformly.
RAGGED = 51, 78, 25, 26, 84, 36, 46, 137, 74, 59, 67, 54, 130, 61, 13, 83
RESEARCH_SHAPE = Setup(tokens=1024, inputs=256, outputs=512, groups=16, rounds=15, given=RAGGED, shares=True, fits=True)
RESEARCH = _case("grouped-ragged", RESEARCH_SHAPE)
EXPERTS = _case("grouped", Setup(tokens=4096, inputs=512, outputs=256, groups=16, rounds=7, shares=True, fits=True))
MANY = _case("grouped-many", Setup(tokens=1024, inputs=256, outputs=256, groups=64, rounds=7, shares=True))
LARGE = _case("grouped-large", Setup(tokens=2048, inputs=1024, outputs=512, groups=8, rounds=5, fits=True))
