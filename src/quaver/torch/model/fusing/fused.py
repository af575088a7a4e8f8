"""What stands above the class of a module that one of our blocks computes, and when the module's own forward runs."""

import inspect
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.model.reach.same import PLAIN
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import forward_level, transforms_active
from quaver.torch.operations.ops import any_autocast_enabled

#: Attributes of every module.
OF_ALL = {*nn.Module().__dict__}
#: What transformers notes of a module that it has loaded or initialized, and no forward reads.
NOTES = {"_is_hf_initialized"}
#: An attribute's name, and what it is.
Named = tuple[tuple[str, Any], ...]

#: What blocks compute in: what was compared. Forwards may do otherwise in float16, such as clamp.
DTYPES = (torch.float32, torch.bfloat16)


class Fused(nn.Module):
    """A module computed by one of our blocks, with its own parameters, submodules, hooks and attributes.

    Its class is made by `quaver.torch.model.reach.exchanging` and says what is computed.
    """

    #: What the block computes, and of which of the module's parts.
    _formula: Any
    #: The class below, and of its members those that were compared with the block.
    _original: Any
    _compared: Named


def fixed(attributes: Mapping[str, Any]) -> Named:
    """Those attributes that are told by their value: numbers, names, tuples of them, and functions."""
    own = ((name, value) for name, value in attributes.items() if name not in OF_ALL and name not in NOTES)
    return tuple((name, value) for name, value in own if _told(value))


def _told(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, FunctionType, BuiltinFunctionType))


def untold(attributes: Mapping[str, Any]) -> str:
    """Why a block must not compute a module with these attributes, or "": one may be written to, and nothing tells."""
    for name, value in attributes.items():
        if name not in OF_ALL and name not in NOTES and isinstance(value, Tensor | list | dict | set):
            return f"its {name} is a {type(value).__name__}, and nothing would tell that it was written to"
    return ""


def changed(attributes: Mapping[str, Any], before: Named) -> bool:
    """Whether an attribute is another than `fixed` has seen."""
    for name, value in before:
        now = attributes.get(name, nn.Module)
        if now is not value and (type(now) is not type(value) or now != value):
            return True
    return False


def replaced(module: Fused) -> bool:
    """Whether the class has another forward than was compared."""
    kind = type(module)
    return kind._original.forward is not dict(kind._compared)["forward"]


def patched(module: Fused, called: bool = False) -> bool:
    """Whether the class or the instance has another forward, or another function that it calls, than was compared.

    Args:
        called: True leaves out a forward of the instance that says that it wraps the class's, as accelerate's does in
            mixed precision: it has called what asks.
    """
    kind = type(module)
    for name, value in kind._compared:
        if name in module.__dict__ and not (called and name == "forward" and _wraps(module, kind)):
            return True
        if getattr(kind._original, name, None) is not value:
            return True
    return False


def _wraps(module: Fused, kind: type) -> bool:
    """Whether the instance's forward is a wrapper, by functools.wraps, of its class's."""
    forward = module.__dict__["forward"]
    return not is_tracing() and inspect.unwrap(getattr(forward, "__func__", forward)) is kind.forward  # type: ignore[attr-defined]


def stands_aside(module: Fused, x: Any) -> bool:
    """True if the module's own forward must run on x: x is no plain tensor, or a transform that our functions have no
    rules for is active."""
    if is_tracing():
        return not isinstance(x, Tensor) or x.dtype not in DTYPES or _narrowed(x)
    if (x.__class__ is not Tensor and x.__class__ is not nn.Parameter) or x.dtype not in DTYPES or x.is_nested:
        return True
    return (any_autocast_enabled() and _narrowed(x)) or transforms_active() or forward_level() >= 0


def _narrowed(x: Tensor) -> bool:
    """Whether torch.autocast gives x's operations a dtype that was not compared."""
    kind = ops.autocast_device(x)
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) not in DTYPES


def casts(x: Tensor) -> bool:
    """Whether torch.autocast may give x's operations other dtypes than x has."""
    return x.dtype is not torch.float32 and torch.is_autocast_enabled(ops.autocast_device(x))
