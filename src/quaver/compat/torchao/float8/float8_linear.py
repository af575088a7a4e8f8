"""`Float8Linear`: `quaver.torch.Linear` under torchao's name."""

from typing import Any

import torch
from torch import nn

from quaver.compat.stand_in import TORCHAO, unknown
from quaver.compat.torchao.float8.config import Float8LinearConfig, recipe_of
from quaver.compat.torchao.float8.float8_training_tensor import linear_mm_config
from quaver.torch.linear.linear import Linear


class _Converted(type):
    """Metaclass that makes isinstance true for every `quaver.torch.Linear`, which is what conversion produces."""

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
        """Create a layer that shares the weight and bias of an nn.Linear.

        Args:
            mod: the nn.Linear, which is not modified.
            config: None means tensorwise, torchao's default.
        """
        with torch.device("meta"):
            new = cls(mod.in_features, mod.out_features, bias=False, config=config or Float8LinearConfig())
        new.weight, new.bias = mod.weight, mod.bias
        return new.train(mod.training)


__getattr__ = unknown(__name__, ("Float8Linear",), TORCHAO)
