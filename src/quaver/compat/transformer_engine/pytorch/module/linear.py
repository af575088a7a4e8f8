"""Transformer Engine's `Linear`."""

from typing import Any

from torch import Tensor

from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.options import spreads
from quaver.torch.linear import linear as layers
from quaver.torch.linear.linear import Split, divide
from quaver.torch.nn.mlp import ComposedBlock


class _Alone(ComposedBlock):
    """A block with a single linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self._modules["linear"]
        y: Tensor = layer(x)
        return y


class Linear(Module, _Alone):
    """Transformer Engine's `Linear`."""

    @spreads(Common)
    def __init__(
        self, in_features: int, out_features: int, *, parallel_mode: str | None = None, parameters_split: Split = None,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, options = in_features, out_features, Common(**others)
        self.linear = layers.Linear(in_features, out_features, options.added, **options.like)
        own = {name: ("linear", name) for name in divide(self.linear, parameters_split)}
        self.lend(options, ("linear",), own, "bias", out_features)
