"""Filters for the `skip=` of every front end's `convert`: layers that are not worth quantizing.

    qt.convert(model, "rowwise", skip=quaver.rules.unprofitable("h100"))
    qt.convert(model, "rowwise", skip=["lm_head", quaver.rules.auto_filter_small_kn("rowwise")])

A filter is called with a layer's name, its features and the recipe that it would get, and returns the reason to skip
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quaver import recipes
from quaver.costs import experts as grouped
from quaver.costs import hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.recipes.conversion import SkipFilter
from quaver.recipes.spec import Recipe
from quaver.recipes.text import suggest

__all__ = ["SkipFilter", "auto_filter_small_kn", "unprofitable"]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)


@dataclass(frozen=True)
class _Unprofitable:
    gpu: Gpu
    tokens: int
    recipe: Recipe | None
    least: float

    def __call__(self, name: str, in_features: int, out_features: int, recipe: Recipe, experts: int = 0) -> str:
        recipe = self.recipe or recipe
        if not recipe.quantizes or not in_features or not out_features:
            return ""
        if experts:
            cost = grouped.layer(recipe, experts, self.tokens, in_features, out_features, self.gpu)
        else:
            cost = ledger.layer(recipe, self.tokens, in_features, out_features, self.gpu)
        gain = cost.speedup
        if gain >= self.least:
            return ""
        return (
            f"predicted {gain:.2f} of bf16's speed as {recipe} on {self.gpu.name} with {self.tokens} tokens, "
            f"less than {self.least:g}"
        )


def unprofitable(
    gpu: str | Gpu, *, tokens: int = 8192, recipe: str | Recipe | None = None, least: float = 1.0
) -> SkipFilter:
    """Skip layers that `quaver.costs.ledger` predicts to be slower than bf16 on this GPU.

    Args:
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu with your own rates.
        tokens: number of tokens that the layer processes at a time; for experts, of all experts together.
        recipe: recipe of the prediction; None uses the one that the layer would get.
        least: minimum predicted speed-up over bf16.

    Raises:
        ValueError: the GPU or recipe is unknown, or a number is invalid.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens is {tokens!r}; give how many tokens a layer sees at a time, 1 or more")
    if not isinstance(least, int | float) or not least > 0:
        raise ValueError(f"least is {least!r}; give the speed-up to reach, such as 1.0")
    return _Unprofitable(hardware.get(gpu), tokens, None if recipe is None else recipes.get(recipe), least)


#: torchao's thresholds by recipe, for (K, N) = (in, out) features (float8_linear_utils.py).
SMALL_KN: dict[str, Callable[[int, int], bool]] = {
    "tensorwise": lambda k, n: k <= 4096 and n <= 1024,
    "rowwise": lambda k, n: n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048),
}


@dataclass(frozen=True)
class _SmallKn:
    recipe: str

    def __call__(self, name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
        sizes = f"K={in_features}, N={out_features}"
        if in_features % 16 or out_features % 16:
            return f"{sizes} are not both multiples of 16 (torchao's auto_filter_small_kn)"
        if SMALL_KN[self.recipe](in_features, out_features):
            return f"{sizes} is too small for {self.recipe} (torchao's auto_filter_small_kn)"
        return ""


def auto_filter_small_kn(recipe: str) -> SkipFilter:
    """Skip layers that torchao's filter of this name skips: fixed thresholds, independent of GPU and tokens.

    Args:
        recipe: recipe of the thresholds, "tensorwise" or "rowwise".

    Raises:
        ValueError: torchao has no thresholds for this recipe.
    """
    if recipe not in SMALL_KN:
        hint = suggest(recipe, SMALL_KN) if isinstance(recipe, str) else f"known: {', '.join(SMALL_KN)}"
        raise ValueError(
            f"torchao's auto_filter_small_kn has no thresholds for {recipe!r}; {hint} "
            "quaver.rules.unprofitable takes every recipe"
        )
    return _SmallKn(recipe)
