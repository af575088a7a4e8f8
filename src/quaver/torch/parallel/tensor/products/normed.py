"""Column layers behind a norm, of which each rank has some tokens: one autograd function, as without ranks.

On a GPU the kernel that normalizes writes the codes, and what is in high precision of the norm's output is not written
where nothing reads it. Where one scale serves all tokens, ranks agree on the amax that the kernel has found, and a
second pass casts; where each row or block has its own, the first pass is the only one. The codes travel.
"""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu.fused import producers
from quaver.torch.linear.entrance import Prologue, note
from quaver.torch.linear.function import pack, shaped, unpack
from quaver.torch.linear.gemms import Call, matrix, quantize, quantized_weight
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.operations.sums import add
from quaver.torch.parallel.tensor.parts import Ranks
from quaver.torch.parallel.tensor.products import function
from quaver.torch.state.history import amax


class Layer(NamedTuple):
    """One of them in this call."""

    call: Call
    ranks: Ranks
    #: This rank's weight, as the DTensor holds it.
    held: Tensor


class NormedInParts(torch.autograd.Function):
    """Of layers and their norm, x [..., features] of this rank's tokens, gamma and beta or None, the layers' weights,
    and their biases or None: the layers' outputs.

    Exact: the bits of the norm followed by each layer.
    """

    @staticmethod
    def forward(ctx: Any, prologue: Prologue, layers: Sequence[Layer], *tensors: Any) -> Any:
        count, taken = len(layers), tensors[:3]
        needs = ctx.needs_input_grad[2:]
        q, kept, saved = _enter(prologue, layers, taken, layers[0].call.record and any(needs[3 : 3 + count]))
        whole = cache(layers[0].ranks.gather("input", q))
        outputs = []
        for (call, ranks, held), bias in zip(layers, tensors[3 + count :], strict=True):
            fprop = call.recipe.fprop
            assert fprop.b is not None
            of_weight = quantized_weight(call, held, "fprop", fprop.b)
            y = function.product(call, fprop, whole(), of_weight, call.dtype, bias)
            outputs.append(shaped(y, ranks.shape(taken[0].shape, y.shape[1])))
        packed, layouts = pack([kept, *saved])
        ctx.save_for_backward(*(layer.held for layer in layers), *packed)
        dtypes = [None if t is None else t.dtype for t in tensors[3:]]
        ctx.constants = prologue, layers, layouts, taken[0].shape, dtypes
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(gs[0])):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)


def _enter(
    prologue: Prologue, layers: Sequence[Layer], x: Sequence[Any], keeps: bool
) -> tuple[Quantized, Tensor | Quantized | None, Sequence[Any]]:
    """This rank's tokens of the layers' input, quantized; what wgrad consumes of them; and what the norm keeps."""
    call, ranks = layers[0].call, layers[0].ranks
    a = call.recipe.fprop.a
    assert a is not None
    factor = None if call.factors is None else call.factors[amax.INPUT]
    is_set = call.factors is not None and amax.is_set(amax.INPUT, call.factors)
    ranks.check("input", x[0].shape[:-1].numel(), a, 0)
    want_output, turn = keeps and not call.plan.input, keeps and call.plan.input
    fused = producers.operand(prologue, x, x[0].shape[-1], a, factor, is_set, want_output, turn, ranks.agreed_of)
    if fused is None:
        output, saved = prologue.forward(*x)
        y = matrix(output)
        q = quantize(call, amax.INPUT, "input", y, a)
        kept = call.turned(y, q)[0] if keeps else None
    else:
        result, q, turned = fused
        saved = result.saved
        if call.record and call.factors is not None:
            amax.record(call.layer, amax.INPUT, q.amax)
        kept = turned
        if keeps and turned is None:
            kept = call.turned(None if result.y is None else matrix(result.y), q)[0]
    note([layer.call for layer in layers[1:]], q)
    return q, kept, saved


def _backward(ctx: Any, tensors: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    prologue, layers, layouts, shape, dtypes = ctx.constants
    count, needs = len(layers), ctx.needs_input_grad[2:]
    kept, *saved = unpack(tensors[count:], layouts)
    of_wgrad = function.WholeOfWgrad()
    of_wgrad.users = sum(needs[3 : 3 + count])
    of_input = any(needs[:3])
    of_weights: list[Any] = [None] * count
    of_biases: list[Any] = [None] * count
    of_y: Tensor | None = None
    # As autograd adds them up: what was computed last comes first.
    for i in reversed(range(count)):
        one = SimpleNamespace()
        one.needs_input_grad = (False,) * 3 + (of_input, needs[3 + i], needs[3 + count + i])
        one.constants = layers[i].call, layers[i].ranks, of_wgrad, [], shape, dtypes[i], dtypes[count + i]
        *_, part, of_weights[i], of_biases[i] = function.backward(one, [tensors[i], kept], gs[i])
        if part is not None:
            of_y = part if of_y is None else add(of_y, part)
    of_x: Sequence[Any] = (None,) * 3
    if of_y is not None:
        of_x = prologue.backward(of_y, saved, None, needs[:3])
    return None, None, *of_x, *of_weights, *of_biases
