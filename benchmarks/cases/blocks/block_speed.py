"""Forward and backward through a whole Transformer layer, as a ratio of the same layer made of torch's own parts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.measuring.figure import Case, Figure, at_most
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import Step, interleave
from benchmarks.subjects import blocks
from benchmarks.subjects.blocks import Plain, Size
from quaver.recipes import RECIPES, get
from quaver.recipes.spec import Recipe

TORCH, OURS = "torch", "quaver bf16"
#: Recipes by displayed name. They are timed separately from bf16 without a recipe, which alone has a target.
RECIPES_SHOWN: Mapping[str, Recipe] = {
    **{f"quaver {name}": RECIPES[name]() for name in ("tensorwise", "delayed", "mxfp8")},
    "quaver tensorwise(attention=True)": get("tensorwise", attention=True),
}
NOTES = (
    "bf16, eager, interleaved; the median of each round's ratio. The plain layer is "
    "nn.RMSNorm or nn.LayerNorm, one nn.Linear for q, k and v, rope by tables made before, "
    "scaled_dot_product_attention, one nn.Linear for gate and up, and F.silu or nn.GELU. A Llama has RMSNorm, rope, "
    "four query heads to a group, SwiGLU and no bias; a GPT has LayerNorm, gelu and biases. quaver bf16 is without a "
    "recipe; the others in autocast, whose entry is part of the step, with weights that do not change."
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes and targets of a case."""

    #: Features of the layer, heads, tokens.
    dim: int
    heads: int
    tokens: int
    #: Rounds of bf16 against torch, and of the recipes.
    rounds: tuple[int, int]
    steps: int
    #: Maximum of bf16's time over torch's.
    highest: float
    #: Unit of times, and how many are a second.
    unit: tuple[str, float]

    def measure(self, quick: bool) -> list[Figure]:
        dim, tokens = (self.heads * 8, 16) if quick else (self.dim, self.tokens)
        sizes = {
            "Llama": Size(dim=dim, heads=self.heads, groups=self.heads // 4, hidden=dim * 7 // 2),
            "GPT": Size(dim=dim, heads=self.heads, groups=self.heads, hidden=dim * 4),
        }
        figures: list[Figure] = []
        for kind, size in sizes.items():
            torch_step, our_step, recipe_steps = steps(kind == "GPT", size, tokens)
            for others, rounds, highest in (({OURS: our_step}, 0, self.highest), (recipe_steps, 1, None)):
                number = 2 if quick else self.rounds[rounds]
                timings = interleave({TORCH: torch_step, **others}, rounds=number, steps=1 if quick else self.steps)
                for name, timing in timings.items():
                    if name == TORCH and highest is None:
                        continue
                    target = None if name == TORCH or highest is None or quick else at_most(highest)
                    figures.append(Figure(name, kind, timing.ratio, "x", target))
                    figures.append(Figure(name, f"{kind}, time", timing.seconds * self.unit[1], self.unit[0]))
        return figures


def steps(gpt: bool, size: Size, tokens: int) -> tuple[Step, Step, dict[str, Step]]:
    """Return a step of the plain layer, of ours, and of ours under each recipe."""
    torch.manual_seed(0)
    plain = Plain(size, tokens, gpt=gpt, fused=True, norm=nn.LayerNorm if gpt else nn.RMSNorm)
    x = torch.randn(1, tokens, size.dim, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(1, tokens, size.dim, dtype=torch.bfloat16)
    recipes = {name: step_of(blocks.ours(plain, size), x, g, recipe) for name, recipe in RECIPES_SHOWN.items()}
    return step_of(plain, x, g), step_of(blocks.ours(plain, size), x, g), recipes


#: Maximum of a Llama layer's time over torch's, in float32.
HIGHEST = 1.8


def measure_llama(quick: bool) -> list[Figure]:
    """Time four Llama layers in float32 under recipes, over torch's layers in plain float32."""
    size = Size(dim=64, heads=8, groups=2, hidden=176) if quick else Size(dim=512, heads=8, groups=2, hidden=1408)
    tokens = 16 if quick else 512
    torch.manual_seed(0)
    plain = [Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm, dtype=torch.float32) for _ in range(4)]
    x, g = (torch.randn(1, tokens, size.dim, requires_grad=wanted) for wanted in (True, False))
    compared: dict[str, Step] = {TORCH: step_of(nn.Sequential(*plain), x, g)}
    for name in ("tensorwise", "delayed", "rowwise", "mxfp8"):
        ours = nn.Sequential(*(blocks.ours(layer, size) for layer in plain))
        compared[f"quaver {name}"] = step_of(ours, x, g, RECIPES[name]())
    timings = interleave(compared, rounds=2 if quick else 5, steps=1)
    target = None if quick else at_most(HIGHEST)
    figures = []
    for name, timing in timings.items():
        figures.append(Figure(name, "ratio", timing.ratio, "x", None if name == TORCH else target))
        figures.append(Figure(name, "time", timing.seconds * 1e3, "ms"))
    return figures


LLAMA = Case(
    name="llama-float32",
    title="Four Transformer layers forward + backward, 512 features, 512 tokens, float32, against torch's parts",
    notes="A Llama's layers as above, in float32, eager, interleaved; weights are quantized in each step.",
    measure=measure_llama,
    of_threads=True,
)
LARGE = Case(
    name="block",
    title="A Transformer layer forward + backward, 1024 features, 512 tokens, against torch's parts",
    notes=NOTES,
    measure=Setup(dim=1024, heads=16, tokens=512, rounds=(15, 5), steps=1, highest=1.10, unit=("ms", 1e3)).measure,
)
SMALL = Case(
    name="block-small",
    title="A Transformer layer forward + backward, 32 features, 32 tokens, against torch's parts",
    notes=NOTES,
    measure=Setup(dim=32, heads=4, tokens=32, rounds=(60, 20), steps=20, highest=1.3, unit=("µs", 1e6)).measure,
)
