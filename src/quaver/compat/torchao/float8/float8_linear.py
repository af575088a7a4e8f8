"""`Float8Linear`: torchao's layer by its name, ours by what it does."""

from typing import Any

import torch
from torch import nn

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.compat.torchao.float8.config import Float8LinearConfig, recipe_of
from quaver.compat.torchao.float8.float8_training_tensor import linear_mm_config
from quaver.torch.linear.linear import Linear


class _Converted(type):
    """Whatever `convert_to_float8_training` converted is one: its class is ours, not a copy of torchao's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Linear)


class Float8Linear(Linear, metaclass=_Converted):
    """`quaver.torch.Linear` with torchao's arguments: those of nn.Linear, and `config`.

    Args:
        config: a `Float8LinearConfig`.
    """

    def __init__(self, *args: Any, config: Float8LinearConfig, **kwargs: Any) -> None:
        super().__init__(*args, recipe=recipe_of(config), **kwargs)
        self.config, self.linear_mm_config = config, linear_mm_config(config)

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> "Float8Linear":
        """A layer that shares the weight and bias of an nn.Linear.

        Args:
            mod: as it is, afterwards too.
            config: None is tensorwise, torchao's default.
        """
        with torch.device("meta"):
            new = cls(mod.in_features, mod.out_features, bias=False, config=config or Float8LinearConfig())
        new.weight, new.bias = mod.weight, mod.bias
        return new.train(mod.training)


__getattr__ = unknown(__name__, ("Float8Linear",), TORCHAO)
