"""The recipes, one file each, and the table `RECIPES` that all else is parametrized over; no code of a framework.

Each is a function of its options that returns a `Recipe`; its name as a string, with or without options, is
taken wherever a recipe is: "mxfp8", "delayed(history=16)".
"""

from collections.abc import Callable
from typing import Any

from quaver.core.converting.schedule import Schedule, read
from quaver.core.recipe_functions import intern
from quaver.core.spec import Recipe
from quaver.core.text.recipe_text import parse
from quaver.core.text.spelling import suggest
from quaver.recipes.bf16 import bf16
from quaver.recipes.blockwise import blockwise
from quaver.recipes.delayed import delayed
from quaver.recipes.mxfp4 import mxfp4
from quaver.recipes.mxfp6 import mxfp6
from quaver.recipes.mxfp8 import mxfp8
from quaver.recipes.nvfp4 import nvfp4
from quaver.recipes.rowwise import rowwise, rowwise_bf16_wgrad
from quaver.recipes.tensorwise import tensorwise

RECIPES: dict[str, Callable[..., Recipe]] = {
    "bf16": bf16,
    "delayed": delayed,
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_bf16_wgrad": rowwise_bf16_wgrad,
    "blockwise": blockwise,
    "mxfp8": mxfp8,
    "mxfp6": mxfp6,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}


def get(recipe: str | Recipe, **options: Any) -> Recipe:
    """The recipe of this name with these options, or the recipe given.

    Args:
        recipe: a name from `RECIPES`, a name with options as text, such as "delayed(history=16)", or a Recipe.
        options: of the recipe function; only with a name.
    Raises:
        ValueError: unknown name or option, the message names the nearest; or text of another form.
    """
    if isinstance(recipe, Recipe):
        if options:
            raise ValueError(
                f"recipe {recipe.name!r} is already built; pass its options {sorted(options)} to its function"
            )
        return intern(recipe)
    if not isinstance(recipe, str):
        raise ValueError(f"a recipe is a name or a quaver.Recipe, not {recipe!r}; try quaver.recipes.get('mxfp8')")
    name, in_text = (recipe, {}) if recipe in RECIPES else parse(recipe)
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}; {suggest(name, RECIPES)}")
    twice = sorted(set(in_text) & set(options))
    if twice:
        raise ValueError(f"recipe {recipe!r} gives {', '.join(twice)} in its text and as an argument; give it once")
    return RECIPES[name](**in_text, **options)


def schedule(text: str, *, steps: int | None = None, peak: float | None = None) -> Schedule:
    """Recipes over a run, as `nvfp4 until 85%, bf16`: `quaver.core.converting.schedule` has the grammar.

        schedule = quaver.recipes.schedule("nvfp4 until 85%, bf16", steps=1000)
        recipe = schedule.at(step)  # before each step, with lr= where a part ends by it
        schedule.saw(loss)  # after each, where a part ends by it

    Args:
        text: parts with commas between, each but the last with its end: `until STEP`, `until SHARE%` (of the steps),
            `until loss<NATS` (the mean of the last 20 steps) or `until lr<SHARE%` (of the peak, after the warm-up).
            A recipe alone is in force all the time.
        steps: of the run in all; needed for shares of it.
        peak: the highest learning rate; needed for ends by learning rate.
    Raises:
        ValueError: the text cannot be read, needs what was not given, or has a part without a step.
    """
    return Schedule(read(text, get), steps=steps, peak=peak)


# Written out, because type checkers do not run code: a recipe that is missing here is an error under mypy --strict.
__all__ = [
    "RECIPES",
    "bf16",
    "blockwise",
    "delayed",
    "get",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nvfp4",
    "rowwise",
    "rowwise_bf16_wgrad",
    "schedule",
    "tensorwise",
]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
