"""torchao's float8 linear layers, emulated or on a GPU: the peer of every case."""

import copy
import dataclasses
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Its recipes that are measured.
RECIPES = ("tensorwise", "rowwise")


@contextmanager
def silence() -> Iterator[None]:
    """Importing torchao where its compiled kernels do not load says so several times."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def available() -> str:
    """Return why torchao cannot be measured, or ""."""
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed"


def convert(model: nn.Module, recipe: str, skip: str = "", emulate: bool = True) -> nn.Module:
    """Swap the linear layers of a model for torchao's, except one of a name; a bare nn.Linear is returned converted."""
    with silence():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        return convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name != skip or not skip
        )


def converted_copy(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    """Return a converted copy of a model that shares its parameters."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return convert(copy.deepcopy(model, memo), recipe, emulate=emulate)
