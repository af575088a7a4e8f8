"""The product of a module that is no nn.Linear and multiplies by a weight of its own, as a linear layer computes it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.core.spec import Recipe
from quaver.torch.linear.entrance import GIVEN, Setup
from quaver.torch.linear.function import Projections, apply
from quaver.torch.linear.layer import Quantizable, refuse_sharded
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import refuse_transforms
from quaver.torch.state.buffers import prepare
from quaver.torch.state.context import ambient


def product(module: Quantizable, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias, quantized as a recipe says, with the state of a module.

    Args:
        weight: the module's parameter, or a view of it.
    Raises:
        ValueError: another dtype than the weight's outside of torch.autocast, or a weight that is sharded.
    """
    if not is_tracing():
        refuse_sharded(module, weight)
    training = torch.is_grad_enabled()
    if training and module._state.prepared is not recipe:
        prepare(module, recipe)
    device = ops.autocast_device(x)
    casting = torch.is_autocast_enabled(device) and x.dtype in ops.DTYPES and weight.dtype in ops.DTYPES
    if casting:
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype is not weight.dtype:
        raise ValueError(
            f"{described(module)} has {weight.dtype} weights and got a {x.dtype} input; convert the input, or enter "
            "torch.autocast"
        )
    if x.dtype not in ops.DTYPES:
        return F.linear(x, weight, bias)
    layers: Any = (module,)
    setup = Setup(GIVEN, layers, recipe, x.dtype, training)
    y: Tensor
    if is_tracing():
        (y,) = Projections.apply(setup, x, weight, bias)
        return y
    refuse_transforms(x, weight, bias)
    with ops.without_autocast(device):
        run: Any = apply if ambient.split is None else ambient.split(Projections, apply)
        (y,) = run(setup, x, weight, bias)
    return y


def described(module: Quantizable) -> str:
    """A module's name, or its class."""
    return module.__dict__.get("qualified_name") or type(module).__name__
