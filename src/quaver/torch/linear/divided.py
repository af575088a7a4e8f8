"""A linear layer whose weight lies in several parameters of some rows each, as those of queries, keys and values."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from quaver.torch.linear.layer import Linear
from quaver.torch.operations.ops import without_autocast

#: Rows of each parameter by name, or names of as many rows each; None leaves a weight whole.
Split = Mapping[str, int] | Iterable[str] | None


class Divided(Linear):
    """Puts its weight and bias together in each forward; what `divide` makes of a layer."""

    #: It computes what `quaver.torch.Linear` does.
    _over = Linear

    def _put_together(self, kind: str) -> Any:
        parts: Any = [p for name, p in self._parameters.items() if name.endswith(f"_{kind}") and p is not None]
        if not parts:
            return None
        # torch.autocast to float16 concatenates nothing in bfloat16.
        with without_autocast(parts[0].device.type):
            return torch.cat(parts)

    weight = property(lambda self: self._put_together("weight"))
    bias = property(lambda self: self._put_together("bias"))

    def reset_parameters(self) -> None:
        """The module that it is a part of does."""


def divide(layer: Linear, parameters_split: Split) -> list[str]:
    """Divide a layer's weight and bias by their rows; returns the names of its parameters.

    Args:
        parameters_split: rows by name; names alone have as many each. None leaves them whole.
    Raises:
        ValueError: rows that are not the weight's; a weight that exists only as codes.
    """
    if parameters_split is None:
        return ["weight", "bias"]
    names = [name.removesuffix("_") for name in parameters_split]
    rows = [layer.out_features // len(names)] * len(names)
    if isinstance(parameters_split, Mapping):
        rows = list(parameters_split.values())
    if sum(rows) != layer.out_features:
        raise ValueError(f"parameters_split has {sum(rows)} rows and the weight {layer.out_features}")
    if layer.weight_spec is not None:
        raise ValueError("a weight that exists only as codes is one parameter: leave parameters_split out")
    for kind in ("weight", "bias"):
        whole = layer._parameters.pop(kind)
        for name, part in zip(names, (None,) * len(names) if whole is None else whole.split(rows), strict=True):
            own = None if part is None else nn.Parameter(part.detach().clone())
            layer.register_parameter(f"{name}_{kind}", own)
    layer.__class__ = Divided
    return list(layer._parameters)
