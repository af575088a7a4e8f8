"""Transformer Engine's `Linear`, and linear layers whose weight is made of several parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.core.options import spreads
from quaver.torch.blocks.norm_linear import Parts
from quaver.torch.linear import layer as layers

#: Rows of each parameter of a weight by name, or names of as many rows each; None leaves it whole.
Split = Mapping[str, int] | Iterable[str] | None


class Joined(layers.Linear):
    """A linear layer whose weight lies in several parameters of some rows each, which a forward puts together."""

    #: It computes what `quaver.torch.Linear` does.
    _over = layers.Linear

    def _put_together(self, kind: str) -> Any:
        parts: Any = [p for name, p in self._parameters.items() if name.endswith(f"_{kind}") and p is not None]
        return torch.cat(parts) if parts else None

    weight = property(lambda self: self._put_together("weight"))
    bias = property(lambda self: self._put_together("bias"))

    def reset_parameters(self) -> None:
        """The module that it is a part of does."""


def divided(layer: layers.Linear, split: Split) -> list[str]:
    """Divide a layer's weight and bias by their rows; returns the names of its parameters.

    Args:
        split: as `parameters_split`.
    Raises:
        ValueError: rows that are not the weight's; a weight that exists only as codes.
    """
    if split is None:
        return ["weight", "bias"]
    names = [name.removesuffix("_") for name in split]
    rows = list(split.values()) if isinstance(split, Mapping) else [layer.out_features // len(names)] * len(names)
    if sum(rows) != layer.out_features:
        raise ValueError(f"parameters_split has {sum(rows)} rows and the weight {layer.out_features}")
    if layer.weight_spec is not None:
        raise ValueError("a weight that exists only as codes is one parameter: leave parameters_split out")
    for kind in ("weight", "bias"):
        whole = layer._parameters.pop(kind)
        for name, part in zip(names, (None,) * len(names) if whole is None else whole.split(rows), strict=True):
            own = None if part is None else nn.Parameter(part.detach().clone())
            layer.register_parameter(f"{name}_{kind}", own)
    layer.__class__ = Joined
    return list(layer._parameters)


class _Alone(Parts):
    """A linear layer, and nothing before it."""

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
        own = {name: ("linear", name) for name in divided(self.linear, parameters_split)}
        self.lend(options, ("linear",), own, "bias", out_features)
