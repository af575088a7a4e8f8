"""torchao's float8 training, eager and compiled, where it is importable."""

import copy
import dataclasses
import importlib.util
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.measuring.setting import Setting
from benchmarks.subjects.peer import RECIPES, silence


def available(setting: Setting) -> str:
    """Why torchao cannot be measured, or ""."""
    if setting.hollow:
        return "torchao is not measured where there is no card"
    return "" if importlib.util.find_spec("torchao") else "torchao is not installed"


def convert(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    """A copy of a model with torchao's linear layers, sharing its parameters; a bare nn.Linear is converted itself."""
    with silence():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        # In a module of its own: a bare layer would not be replaced where torchao looks for children.
        holder = nn.ModuleList([copy.deepcopy(model, memo)])
        convert_to_float8_training(holder, config=config)
        return holder[0]


def compiled(model: nn.Module, setting: Setting) -> nn.Module:
    """By torch.compile, for one shape; a dry run leaves out what makes the machine code, which takes a minute."""
    backend = "aot_eager" if setting.toy else "inductor"
    module: nn.Module = torch.compile(model, dynamic=False, backend=backend)
    return module


__all__ = ["RECIPES", "available", "compiled", "convert"]
