"""Comparison of a training script under several recipes: same seeds, one run after another in this process."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from quaver.comparison.report import save
from quaver.comparison.results import BASELINE, NULL, Comparison
from quaver.comparison.scripts import iterate, named_recipes, perturbed, run_scripts
from quaver.recipes.conversion import Rules
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance
from quaver.torch.conversion.convert import convert
from quaver.torch.linear.linear import Quantizable

Model = TypeVar("Model", bound=nn.Module)
#: Anything that `convert` accepts as its recipe.
AnyRecipe = str | Recipe | Rules | Mapping[str, Recipe | str | None]


def compare(
    make_model: Callable[[int], Model],
    train: Callable[[Model, int], Iterable[float | Tensor]],
    recipes: Sequence[str | Recipe] | Mapping[str, AnyRecipe],
    *,
    seeds: int = 3,
    margin: float = 0.01,
    out: str | Path | None = None,
) -> Comparison:
    """Train a model under several recipes with the same seeds, and test the differences of the loss from bf16.

        def train(model, seed):
            optimizer = torch.optim.AdamW(model.parameters())
            for x, target in batches(seed):
                loss = ...
                ...
                yield loss.item()

        print(qt.compare(make_model, train, ["mxfp8", "nvfp4"]))

    Two runs are always included: "bf16", the model as `make_model` returns it, and "null", the same with each parameter
    times 1 + 1e-5·randn, which shows what chance does. torch's global generator is seeded before `make_model` and again
    before `train`, and restored at the end.

    Args:
        make_model: called with a seed; returns a new model in high precision.
        train: called with the converted model and a seed; makes its own optimizer and yields the loss of each step.
        recipes: names or recipes, or a dict of names and anything that `convert` takes as its recipe.
        seeds: number of runs per recipe, with seeds 0, 1, ...
        margin: largest difference from bf16, in nats, that counts as none.
        out: a new folder for the losses of each run (NAME-seedN.jsonl, written during the run), report.md and
            compare.png; None writes no files.
    Returns:
        Losses of each run, and the paired differences of the mean loss of the last 10 % of steps with 95 % intervals
        and verdicts. A run whose loss is not finite is stopped and reported as diverged.
    Raises:
        ValueError: a bad argument, before the first run; a model that is not new or not in high precision; a `train`
            that yields no numbers, or another number of steps in one run than in another.
    """
    named = named_recipes(recipes)
    emulated = False
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def start(name: str, seed: int) -> Iterator[float | Tensor]:
        nonlocal emulated
        torch.manual_seed(seed)
        model = make_model(seed)
        _check_model(model, seen)
        seen.add(model)
        converted = []
        if name == NULL:
            _perturb(model, seed)
        elif name != BASELINE:
            converted = [row for row in convert(model, named[name], seed=seed).rows if row.recipe is not None]
        torch.manual_seed(seed)
        try:
            yield from iterate(train(model, seed))
        finally:  # `train` may have moved the model
            device = next(iter(model.parameters())).device
            emulated |= any(replace(row, device=device).implementation not in ("native", "torch") for row in converted)

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        runs = run_scripts(start, named, seeds=seeds, margin=margin, out=None if out is None else Path(out))
    comparison = Comparison(runs=runs, margin=margin, emulated=emulated)
    if out is not None:
        save(comparison, Path(out))
    return comparison


def _check_model(model: object, seen: Collection[nn.Module]) -> None:
    """Raise an error unless `make_model` has returned a new model in high precision."""
    check_instance("compare", "make_model(seed)", model, nn.Module, "torch.nn.Linear(64, 64)")
    assert isinstance(model, nn.Module)
    if model in seen:
        raise ValueError("make_model returned a model that another run has trained; build a new one, or copy.deepcopy")
    names = [name for name, m in model.named_modules() if isinstance(m, Quantizable) and m.recipe is not None]
    if names or not any(True for _ in model.parameters()):
        wrong = f"whose layer {names[0] or '(root)'} is converted" if names else "without parameters"
        raise ValueError(f"make_model returned a model {wrong}; return it in high precision, and compare converts it")


def _perturb(model: nn.Module, seed: int) -> None:
    """Perturb each parameter of a model as a null run does, in place."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(torch.from_numpy(perturbed(p.double().cpu().numpy(), torch.finfo(p.dtype).eps, random)))
