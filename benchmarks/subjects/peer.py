"""torchao's float8 linear layers in emulation, the peer that every case sets beside ours."""

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


def convert(model: nn.Module, recipe: str, skip: str = "") -> nn.Module:
    """Swap the linear layers of a model for torchao's, emulated, but for one of a name; a bare nn.Linear is returned
    converted."""
    with silence():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        return convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name != skip or not skip
        )
