"""Recipes as a user types them: `mxfp8`, with options, `delayed(history=16)`, and over a run, `nvfp4 until 85%, bf16`.

The grammar is that of `quaver.core.converting.schedule`. In a list of recipes a part with `until` and the
part after it are of one item: `bf16, nvfp4 until 85%, bf16, mxfp8` is three.
"""

import re
import warnings
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import quaver.recipes
from quaver.core.converting.schedule import End, Part, Schedule, read
from quaver.core.spec import Recipe
from quaver.core.text.given import shown
from quaver.core.text.recipe_text import end_of, items, pieces
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.schedule import lr_at
from quaver.train.configuration.sizes import MODELS


def find(text: str) -> Recipe:
    """The recipe that a text names. Raises: ValueError, with a suggestion, if there is none."""
    if any(end_of(piece)[1] is not None for piece in pieces(text)):
        raise ValueError(f"recipe {shown(text)} changes over a run, and here is no run; give the recipe of one part")
    with warnings.catch_warnings():
        # Of odd escapes, which are an option's value all the same.
        warnings.simplefilter("ignore", SyntaxWarning)
        return quaver.recipes.get(text)


def parts(text: str) -> tuple[Part, ...]:
    """The recipes of a run's text and where each ends. Raises: ValueError that says what to write."""
    return read(text, find)


def schedule_of(config: TrainConfig) -> Schedule:
    """The recipes of a run, from its first step.

    Raises: ValueError if the text cannot be read, or a part would have no step.
    """
    peak = config.lr or MODELS[config.model].lr
    every = parts(config.recipe)
    # What the learning rate does is known: a part that it leaves no step is refused as one of fixed steps is.
    Schedule([replace(part, end=known(part.end, peak, config)) for part in every], steps=config.steps, peak=peak)
    return Schedule(every, steps=config.steps, peak=peak)


def known(end: End | None, peak: float, config: TrainConfig) -> End | None:
    """An end by learning rate as the step that it comes to, any other as it is.

    Raises: ValueError if the learning rate never falls so far.
    """
    if end is None or end.kind != "lr":
        return end
    bound = float(end.value) * peak
    falling = range(config.warmup + 1, config.steps + 1)  # a linear warm-up, then a cosine that only falls
    at = bisect_left(falling, True, key=lambda step: lr_at(step, config) < bound)
    risen = max((lr_at(step, config) for step in (config.warmup, config.warmup + 1) if step), default=0.0)
    if at == len(falling) or risen < bound:
        raise ValueError(
            f"'until {end.text}' never comes: in {config.steps} steps, with warmup {config.warmup} and final_lr "
            f"{config.final_lr:g}, the learning rate does not fall so far; give a larger share, or a lower --final-lr"
        )
    return replace(end, kind="step", value=Fraction(falling[at] - 1))


def split(text: str) -> list[str]:
    """The recipes of a comma-separated list; commas inside parentheses belong to a recipe's options, and one after
    `until` and an end to a schedule."""
    return list(items(text))


def folder(text: str) -> str:
    """A recipe's text as part of a folder's name: `delayed(history=16)` becomes `delayed-history=16`, and
    `nvfp4 until 85%, bf16` becomes `nvfp4-until-85pct,bf16`."""
    said = re.sub(r"\s+until\s+", "-until-", text.strip())
    for letter, name in (("(", "-"), ("%", "pct"), ("<", "-below-")):
        said = said.replace(letter, name)
    return re.sub(r"[^\w=.,+-]", "", said)
