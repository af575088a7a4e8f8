"""Transformer Engine's `Linear`, and linear layers whose weight is made of several parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.core.options import takes
from quaver.torch.blocks.norm_linear import Parts
from quaver.torch.linear import layer as layers


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


def divided(layer: layers.Linear, split: Mapping[str, int] | Iterable[str] | None) -> list[str]:
    """Divide a layer's weight and bias by their rows; returns the names of its parameters.

    Args:
        split: rows by name, as `parameters_split`; names alone have as many each. None leaves them whole.
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


@dataclass
class LinearArguments(Common):
    """The arguments of `Linear`."""

    in_features: int
    out_features: int
    _: KW_ONLY
    parallel_mode: str | None = None
    parameters_split: Mapping[str, int] | Iterable[str] | None = None


class Linear(Module, Parts):
    """Transformer Engine's `Linear`; `is_first_microbatch` tells what is known here, `fp8_output` and `fp8_grad` are
    refused."""

    @takes(LinearArguments)
    def __init__(self, options: LinearArguments) -> None:
        super().__init__()
        self.in_features, self.out_features = options.in_features, options.out_features
        added = options.bias and not options.return_bias
        self.linear = layers.Linear(options.in_features, options.out_features, added, **options.like)
        names = divided(self.linear, options.parameters_split)
        own = {name: ("linear", name) for name in names}
        self.lend(options, ("linear",), own | self.beside(options, "bias", options.out_features))

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        refuse_codes(fp8_output, fp8_grad)
        with self.takes:
            y = self.linear(inp)
        return only(self.with_bias(y))


def only(outputs: tuple[Any, ...]) -> Any:
    """One output by itself, or several."""
    return outputs if len(outputs) > 1 else outputs[0]


def refuse_codes(fp8_output: bool, fp8_grad: bool = False) -> None:
    """Raise the ValueError for what is to be given as codes."""
    if fp8_output or fp8_grad:
        raise ValueError("fp8_output and fp8_grad are not there: values between layers are in high precision")
