"""`quaver.compat`: layers by the names of Transformer Engine and torchao, and state dicts of both."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

import quaver.compat.transformer_engine.pytorch as te
from quaver.compat.torchao import float8
from quaver.compat.transformer_engine.common import recipe as te_recipe
from tests.golden.cases.linear import fill, note
from tests.golden.inputs import values
from tests.golden.record import Record

RECIPES: dict[str, Callable[[], Any]] = {
    "delayed": te_recipe.DelayedScaling,
    "current": te_recipe.Float8CurrentScaling,
    "mxfp8": te_recipe.MXFP8BlockScaling,
    "block": te_recipe.Float8BlockScaling,
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: te.Linear(64, 96),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm"),
    "TransformerLayer": lambda: te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0),
}


def cases() -> dict[str, Callable[[Record], None]]:
    found: dict[str, Callable[[Record], None]] = {
        f"te.{name}, {recipe}": partial(engine, MODULES[name], RECIPES[recipe])
        for name, recipe in product(MODULES, RECIPES)
    }
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        found[f"torchao, {recipe}"] = partial(torchao, recipe)
    return found


def engine(make: Callable[[], nn.Module], recipe: Callable[[], Any], record: Record) -> None:
    model = make()
    fill(model)
    for step in range(2):
        x = torch.from_numpy(values(16, 2, 64, seed=step)).requires_grad_()
        with te.autocast(recipe=recipe()):
            y = model(x)
        y.backward(torch.from_numpy(values(*y.shape, seed=60)))
        record.sum(**{f"y{step}": y, f"dx{step}": x.grad})
    note(record, model)


def torchao(recipe: str, record: Record) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    fill(model)
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    x = torch.from_numpy(values(32, 64, seed=1)).bfloat16().requires_grad_()
    y = model(x)
    y.backward(torch.from_numpy(values(*y.shape, seed=2)).bfloat16())
    note(record, model, y=y, dx=x.grad)
