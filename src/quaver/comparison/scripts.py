"""Comparison of a user's training script under several recipes: runs that yield a loss per step, one after another."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from quaver.comparison.files import check_steps, finished_run
from quaver.comparison.report import check_plotting
from quaver.comparison.results import BASELINE, NUDGE, NULL, ComparedRun, check_margin
from quaver.recipes import get
from quaver.recipes.conversion import ConversionRules
from quaver.recipes.text import folder_name, shown

ADVICE = "let train yield the loss of each step, such as `yield loss.item()`"


def named_recipes(recipes: Any) -> dict[str, Any]:
    """Return recipes by name, without bf16, from a list of recipes or a dict. Raises: ValueError for anything else."""
    if isinstance(recipes, Mapping):
        named = dict(recipes)
        if reserved := sorted({BASELINE, NULL} & set(named)):
            raise ValueError(f"recipes has the name {reserved[0]!r}, which is always compared; give another name")
    elif isinstance(recipes, Sequence) and not isinstance(recipes, str):
        named = {}
        for recipe in recipes:
            if named.setdefault(str(recipe), recipe) != recipe:
                raise ValueError(f"recipes has two named {str(recipe)!r}; give a dict of names and recipes")
        named.pop(BASELINE, None)
    else:
        raise ValueError(f"recipes is {shown(recipes)}; give a list such as ['mxfp8', 'nvfp4'], or a dict of names")
    if not named:
        raise ValueError(f"recipes has none beside {BASELINE}; give at least one, such as ['mxfp8']")
    if len({folder_name(name) for name in named}) < len(named):
        raise ValueError(f"the names {list(named)} are too similar for names of files; use letters and digits")
    for recipe in named.values():
        for rule in ConversionRules(recipe, ()).rules.rules:
            if rule.recipe is not None:
                get(rule.recipe)
    return named


def perturbed(values: np.ndarray, eps: float, random: np.random.Generator) -> np.ndarray:
    """Return the weights of a null run in float64: values times 1 + 1e-5·randn.

    Args:
        eps: distance of 1 and the next value of the weights' dtype. Where it exceeds the change, the result is rounded
            to that dtype stochastically, so that the change is right in the mean.
    """
    moved = values * (1 + NUDGE * random.standard_normal(values.shape))
    if eps > NUDGE:
        step = np.ldexp(eps / 2, np.frexp(moved)[1])
        moved = np.floor(moved / step + random.random(values.shape)) * step
    return moved


def run_scripts(
    start: Callable[[str, int], Iterable[Any]], names: Iterable[str], *, seeds: int, margin: float, out: Path | None
) -> tuple[ComparedRun, ...]:
    """Run bf16, the null run and the named recipes with each seed, and write their losses into a folder.

    Args:
        start: begins the run of a name and a seed, and returns its losses step by step.
        names: recipes beside bf16 and the null run.
        seeds: number of runs per name, with seeds 0, 1, ...
        margin: as in `Comparison`; checked before the first run.
        out: a new folder; None writes no files.
    Returns:
        The runs, by name and seed.
    Raises:
        ValueError: a bad argument; a run that yields no losses or other than numbers, or other steps than the first.
    """
    check_margin(margin)
    if type(seeds) is not int or seeds < 1:
        raise ValueError(f"seeds is {shown(seeds)}; give the number of runs per recipe, 1 or more")
    names = [BASELINE, NULL, *names]
    if out is not None:
        check_plotting()
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out is {str(out)!r}, which exists and is not empty; give a new folder")
        out.mkdir(parents=True, exist_ok=True)
    runs: list[ComparedRun] = []
    # All recipes of a seed, then the next seed: a run that is stopped leaves whole pairs.
    for seed in range(seeds):
        for name in names:
            with ExitStack() as stack:
                file = None
                if out is not None:
                    file = stack.enter_context((out / f"{folder_name(name)}-seed{seed}.jsonl").open("x", buffering=1))
                done, diverged = {}, None
                for step, loss in enumerate(_numbers(start(name, seed), f"{name} seed {seed}"), 1):
                    done[step] = loss
                    if file is not None:
                        file.write(json.dumps({"step": step, "loss": loss}) + "\n")
                    if not math.isfinite(loss):
                        diverged = step
                        break
            runs.append(finished_run(name, seed, done, diverged))
            check_steps(runs)
    return tuple(sorted(runs, key=lambda run: names.index(run.recipe)))


def iterate(returned: Any) -> Iterator[Any]:
    """Return an iterator over the losses that a `train` function has returned. Raises: ValueError if it has none."""
    try:
        return iter(returned)
    except TypeError as error:
        raise ValueError(f"train returned {shown(returned)}; {ADVICE}") from error


def _numbers(losses: Iterable[Any], label: str) -> Iterator[float]:
    """Yield the losses of a run as floats. Raises: ValueError for other objects, or if there is none."""
    step = 0
    for step, loss in enumerate(losses, 1):
        try:
            if isinstance(loss, str):
                raise TypeError("text")
            number = float(loss.detach() if hasattr(loss, "detach") else loss)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{label}: train yielded {shown(loss)} at step {step}; {ADVICE}") from error
        yield number
    if not step:
        raise ValueError(f"{label}: train yielded no loss; {ADVICE}")
