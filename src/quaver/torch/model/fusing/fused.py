"""What stands above the class of a module that one of our blocks computes, and when the module's own forward runs."""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.internals import forward_level, transforms_active
from quaver.torch.operations import ops

#: What blocks compute in.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fused(nn.Module):
    """A module computed by one of our blocks, with its own parameters, submodules, hooks and attributes.

    Its class is made by `quaver.torch.model.reach.exchanging` and says what is computed.
    """

    #: What the block computes, and of which of the module's parts.
    _formula: Any
    #: The class below, and its forward as it was compared with the block.
    _original: Any
    _compared: Any


def stands_aside(module: Fused, x: Any) -> bool:
    """True if the module's own forward must run on x: it was patched since, x is no plain tensor, or a transform that
    our functions have no rules for is active."""
    kind = type(module)
    if kind._original.forward is not kind._compared:
        return True
    if torch.compiler.is_compiling():
        return not isinstance(x, Tensor) or x.dtype not in DTYPES
    if (x.__class__ is not Tensor and x.__class__ is not nn.Parameter) or x.dtype not in DTYPES or x.is_nested:
        return True
    return transforms_active() or forward_level() >= 0


def casts(x: Tensor) -> bool:
    """Whether torch.autocast may give x's operations other dtypes than x has."""
    return x.dtype is not torch.float32 and torch.is_autocast_enabled(ops.autocast_device(x))
