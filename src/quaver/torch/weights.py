"""A layer's quantized weight, kept until the weight changes: once per optimizer step, however many micro-batches.

The key is the parameter itself, its storage, its address, its version and a count of optimizer steps: torch's fused
optimizers write weights without moving `_version`. A write through `.data` is seen by none of them; `refresh` drops
what is kept. It belongs to one layer in one process: it is neither copied, pickled nor part of the state dict.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from quaver.core.spec import QuantSpec
from quaver.torch.quantized import Quantized


class _Entry(NamedTuple):
    parameter: "weakref.ref[Tensor]"
    #: Held weakly, but held: a later storage cannot get its identity, as one can get its address (.bfloat16().float()).
    storage: StorageWeakRef
    address: int
    version: int
    steps: int
    spec: QuantSpec
    factor: float
    quantized: Quantized


class _Kept(dict[str, _Entry]):
    """What one layer keeps, by side; a copy of the layer starts without."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Kept":
        return _Kept()


class _Steps:
    """How many steps any optimizer has taken since the first weight was kept."""

    count = 0
    hooked = False


def lookup(layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: float) -> Quantized | None:
    """The kept operand for a side ("fprop" or "dgrad"), or None where the weight, spec or factor has changed."""
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
        and entry.storage.cdata == weight.untyped_storage()._cdata
    ):
        return entry.quantized
    return None


def keep(layer: nn.Module, side: str, weight: Tensor, spec: QuantSpec, factor: float, q: Quantized) -> None:
    """Keep an operand, if the weight is a parameter whose changes can be seen."""
    if not can_keep(weight):
        return
    if not _Steps.hooked:
        register_optimizer_step_post_hook(_count)
        _Steps.hooked = True
    storage = StorageWeakRef(weight.untyped_storage())
    entry = _Entry(weakref.ref(weight), storage, weight.data_ptr(), weight._version, _Steps.count, spec, factor, q)
    layer.__dict__.setdefault("_weights", _Kept())[side] = entry


def can_keep(weight: Tensor) -> bool:
    """Whether the weight is a parameter whose changes can be seen."""
    return isinstance(weight, nn.Parameter) and not weight.is_inference() and not torch.is_inference_mode_enabled()


def refresh(model: nn.Module) -> None:
    """Drop every kept weight of a model: call it after writing to weights through `.data`."""
    for module in model.modules():
        drop(module)


def drop(layer: nn.Module) -> None:
    """Drop what one layer keeps of its weight."""
    for kept in ("_weights", "_direct_weight"):
        layer.__dict__.pop(kept, None)


def _count(optimizer: object, args: object, kwargs: object) -> None:
    _Steps.count += 1


def stepped() -> None:
    """Count a step that no hook has seen, as a replayed one."""
    _Steps.count += 1
