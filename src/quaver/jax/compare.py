"""Comparison of a training script under several recipes: same seeds, one run after another in this process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from quaver.comparison.report import save
from quaver.comparison.results import BASELINE, NULL, Comparison
from quaver.comparison.scripts import iterate, named_recipes, perturbed, run_scripts
from quaver.recipes.spec import Recipe

Tree = TypeVar("Tree")


def perturb(params: Tree, seed: int) -> Tree:
    """Return a pytree of parameters with each weight times 1 + 1e-5·randn, for the null run of `compare`."""
    random = np.random.default_rng(seed)

    def leaf(value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        moved = perturbed(np.asarray(value, np.float64), float(jnp.finfo(value.dtype).eps), random)
        return jax.device_put(moved.astype(value.dtype), getattr(value, "sharding", None))

    moved: Tree = jax.tree.map(leaf, params)
    return moved


def compare(
    train: Callable[[Any, int], Iterable[Any]],
    recipes: Sequence[str | Recipe] | Mapping[str, Any],
    *,
    seeds: int = 3,
    margin: float = 0.01,
    out: str | Path | None = None,
) -> Comparison:
    """Train under several recipes with the same seeds, and test the differences of the loss from bf16.

        def train(recipe, seed):
            params = init(jax.random.key(seed))
            if recipe == "null":  # bf16 from perturbed weights
                params, recipe = qj.perturb(params, seed), "bf16"
            for batch in batches(seed):
                with qj.autocast(recipe):
                    loss, params = step(params, batch)
                yield loss

        print(qj.compare(train, ["mxfp8", "nvfp4"]))

    Args:
        train: called with a recipe and a seed; yields the loss of each step. With "null" it trains as with "bf16" from
            weights that `perturb` has changed, which shows what chance does.
        recipes: names or recipes, or a dict of names and whatever `train` takes as a recipe, such as rules of
            `quaver.jax.nnx.convert`. "bf16" and "null" are always included.
        seeds: number of runs per recipe, with seeds 0, 1, ...
        margin: largest difference from bf16, in nats, that counts as none.
        out: a new folder for the losses of each run (NAME-seedN.jsonl, written during the run), report.md and
            compare.png; None writes no files.
    Returns:
        Losses of each run, and the paired differences of the mean loss of the last 10 % of steps with 95 % intervals
        and verdicts. A run whose loss is not finite is stopped and reported as diverged.
    Raises:
        ValueError: a bad argument, before the first run; a `train` that yields no numbers, or another number of steps
            in one run than in another.
    """
    named = {BASELINE: BASELINE, NULL: NULL, **named_recipes(recipes)}

    def start(name: str, seed: int) -> Iterator[Any]:
        try:
            yield from iterate(train(named[name], seed))
        except ValueError as error:
            if name == NULL:
                error.add_note('the recipe "null" means "bf16" from weights that quaver.jax.perturb has changed')
            raise

    names = list(named)[2:]
    runs = run_scripts(start, names, seeds=seeds, margin=margin, out=None if out is None else Path(out))
    comparison = Comparison(runs=runs, margin=margin, emulated=jax.default_backend() == "cpu")
    if out is not None:
        save(comparison, Path(out))
    return comparison
