"""A layer's quantized weight, kept until the weight changes: once per optimizer step, however many micro-batches there are.

The key is the parameter itself, its address, its version and a count of optimizer steps: torch's fused optimizers write
weights without moving `_version`. A write through `.data` is seen by none of them; `refresh` drops what is kept.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quaver.core.spec import QuantSpec
from quaver.torch.quantized import Quantized


class _Entry(NamedTuple):
    parameter: "weakref.ref[Tensor]"
    address: int
    version: int
    steps: int
    spec: QuantSpec
    factor: Any
    quantized: Quantized


class _Steps:
    """How many steps any optimizer has taken since the first weight was kept."""

    count = 0
    hooked = False


def lookup(layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: float) -> Quantized | None:
    """The kept operand for a side ("fprop" or "dgrad"), or None where the weight, the spec or the factor has changed."""
    kept = layer.__dict__.get("_weights")
    if kept is None:
        return None
    entry = kept.get(side)
    if (
        entry is not None
        and entry.parameter() is weight
        and entry.spec is spec
        and entry.factor == factor
        and entry.steps == _Steps.count
        and entry.version == weight._version
        and entry.address == weight.data_ptr()
    ):
        return entry.quantized  # type: ignore[no-any-return]
    return None


def keep(layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: float, q: Quantized) -> None:
    """Keep an operand, if the weight is a parameter whose changes can be seen."""
    if not isinstance(weight, nn.Parameter) or weight.is_inference() or torch.is_inference_mode_enabled():
        return
    if not _Steps.hooked:
        register_optimizer_step_post_hook(_count)
        _Steps.hooked = True
    entry = _Entry(weakref.ref(weight), weight.data_ptr(), weight._version, _Steps.count, spec, factor, q)
    layer.__dict__.setdefault("_weights", {})[side] = entry


def refresh(model: nn.Module) -> None:
    """Drop every kept weight of a model: call it after writing to weights through `.data`."""
    for module in model.modules():
        module.__dict__.pop("_weights", None)


def _count(optimizer: object, args: object, kwargs: object) -> None:
    _Steps.count += 1
