"""The autograd function of grouped products: rows that are given or made on the way, and a matrix of each group.

rows = made(x)        y[t] = rows[t] @ weight[e].T + bias[e]        row t belongs to group e
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import Recipe
from quaver.torch.linear.function import pack, unpack
from quaver.torch.linear.grouped import device, host
from quaver.torch.linear.grouped.call import Call, Product, Source, begin, settle
from quaver.torch.linear.grouped.host import Like, Operands
from quaver.torch.linear.grouped.rows import Rows
from quaver.torch.numerics.groups import Offsets
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import first_derivative
from quaver.torch.operations.selecting import unseen


class Setup(NamedTuple):
    """Everything in one call that is no tensor to be differentiated."""

    rows: Rows
    #: Tensors that these take.
    taken: int
    owner: Source | Product
    recipe: Recipe
    offsets: Offsets
    #: Of the products.
    dtype: torch.dtype
    #: Whether gradients are switched on; what a tensor needs torch says as if they always were.
    training: bool
    #: Whether the weight lies as [groups, K, N].
    turned: bool = False


class Grouped(torch.autograd.Function):
    """Of a `Setup`, what its rows take, the weight [groups, N, K] and the bias [groups, N] or None: y [T, N].

    Saves plain tensors only: no wrapper subclass is on the way.
    """

    @staticmethod
    @unseen
    def forward(ctx: Any, setup: Setup, *tensors: Tensor | None) -> Tensor:
        taken, recipe, rows = setup.taken, setup.recipe, setup.rows
        weight, bias = tensors[taken:]
        assert weight is not None
        needs = [setup.training and need for need in ctx.needs_input_grad[1:]]
        of_rows, need_weight = any(needs[:taken]), needs[taken]
        call = begin(setup.owner, recipe, setup.offsets, setup.dtype, setup.training)
        x, saved = rows.forward(*tensors[:taken], spec=recipe.fprop.a)
        keeps = bool(need_weight) and not rows.remakes
        high = rows.high(saved) if keeps and isinstance(x, Quantized) and not recipe.plan.input else None
        way = _way(setup.offsets)
        y, kept = way.forward(call, x, high, weight, bias, keeps)
        settle(call)
        like = _like(call, weight, bias, setup.turned)
        remakes = bool(need_weight) and rows.remakes
        values = [weight if of_rows else None, *(saved if of_rows or remakes else ())]
        laid = None if kept is None else kept.laid
        parts = () if kept is None else (kept.rows, *kept.parts)
        if laid is not None:
            parts = (None, laid.data, laid.scale, laid.factor)
            laid = replace(laid, data=None, scale=None, factor=None)
        packed, layouts = pack([*values, *parts])
        ctx.save_for_backward(*packed)
        ctx.constants = setup, call, like, layouts, len(values) - 1, kept is not None, laid
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


NO_DOUBLE_BACKWARD = (
    "quantized grouped GEMMs have no second derivative: rounding has none. Compute the part that is differentiated "
    "twice in high precision"
)


def _way(offsets: Offsets) -> Any:
    """The module whose functions run a call: where groups end the host knows, or not."""
    return host if ops.on_host(offsets.ends) else device


def _like(call: Call, weight: Tensor, bias: Tensor | None, turned: bool) -> Like:
    n, k = host.features(call, weight)
    groups = weight.shape[0]
    of_bias = torch.float32 if bias is None else bias.dtype
    return Like((groups, n, k), weight.dtype, turned, (groups, n), of_bias)


def _backward(ctx: Any, tensors: Sequence[Any], g: Tensor) -> tuple[Any, ...]:
    setup: Setup
    call: Call
    setup, call, like, layouts, size, kept_any, laid = ctx.constants
    weight, *values = unpack(tensors, layouts)
    saved, parts = values[:size], values[size:]
    taken, rows = setup.taken, setup.rows
    needs = ctx.needs_input_grad[1:]
    of_rows, need_weight = any(needs[:taken]), needs[taken]
    if call.owed is not None:
        call.owed.settle()
    way, kept = _way(setup.offsets), Operands(parts[1:], parts[0]) if kept_any else None
    if laid is not None:
        _, data, scale, factor = parts
        kept = Operands(laid=replace(laid, data=data, scale=scale, factor=factor))
    if kept is None and need_weight:
        x = rows.remake(saved, setup.recipe.fprop.a)
        high = rows.high(saved) if isinstance(x, Quantized) and not setup.recipe.plan.input else None
        kept = way.remade(call, x, high)
    of_x, of_weight, of_bias = way.backward(call, g, weight, kept, (of_rows, *needs[taken:]), like)
    settle(call)
    gradients: tuple[Any, ...] = (None,) * taken
    if of_rows:
        assert of_x is not None
        gradients = rows.backward(of_x, saved, needs[:taken])
    return None, *gradients, of_weight, of_bias
