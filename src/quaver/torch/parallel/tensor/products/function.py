"""The autograd function of a linear layer of which each rank has a part, composed of the GEMMs of every linear layer.

    Column   y = gather(x) @ weight.T + bias        grad_x = sum over ranks (gather(g) @ weight)
    Row      y = sum over ranks (x @ weight.T) + bias   grad_x = gather(g) @ weight

What is gathered travels as codes beside scales, and what is summed as float32, rounded once. Kept for backward is this
rank's part of what wgrad consumes, which is gathered there. The codes, scales and noise are those of a single process;
so are the products but for the order of the sums that several ranks share.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import GemmSpec
from quaver.torch.linear.entrance import facts_of, may_share, note
from quaver.torch.linear.function import pack, shaped, unpack
from quaver.torch.linear.gemms import Call, high_precision, matrix, plain, quantize, quantized_weight
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops, siblings
from quaver.torch.operations.derivatives import NO_DOUBLE_BACKWARD, first_derivative
from quaver.torch.parallel import wire
from quaver.torch.parallel.tensor.parts import Ranks
from quaver.torch.parallel.tensor.products import overlapping
from quaver.torch.state import kept_weights
from quaver.torch.state.history import amax


class LinearInParts(torch.autograd.Function):
    """Of a call, its `Ranks`, this rank's weight twice, the input [..., features] and the bias or None: the output.

    The first weight is the very tensor that the DTensor holds, the second is what its gradient goes to.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, ranks: Ranks, held: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        fprop, y = call.recipe.fprop, matrix(x)
        overlaps = ranks.overlaps(y, held, fprop)
        shared = _enter(call, ranks, y, call.record and ctx.needs_input_grad[4], overlaps)
        if fprop.b is None:
            if call.record and ranks.is_quantizable:
                # Nothing else looks at the weight here.
                kept_weights.look(ranks.layer, ranks.parameter)
            of_weight: Tensor | Quantized = held
        else:
            of_weight = quantized_weight(call, held, "fprop", fprop.b)
        if overlaps:
            output = _overlapped(ranks, y, held, bias)
        elif ranks.layout.column:
            output = product(call, fprop, shared.whole(), of_weight, call.dtype, bias)
        else:
            total = ranks.sum(product(call, fprop, shared.whole(), of_weight, of_sums(call.dtype)))()
            output = (total if bias is None else total + bias).to(call.dtype)
        saved, layouts = pack([shared.kept])
        ctx.save_for_backward(held, *saved)
        ctx.constants = (
            call,
            ranks,
            shared.of_wgrad,
            layouts,
            x.shape,
            weight.dtype,
            None if bias is None else bias.dtype,
        )
        return shaped(output, ranks.shape(x.shape, output.shape[1]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(backward, ctx, NO_DOUBLE_BACKWARD, g)


class WholeOfWgrad:
    """What wgrad consumes, put together once for the layers that share it."""

    __slots__ = ("pending", "users")

    def __init__(self) -> None:
        #: How many backwards have yet to ask.
        self.users = 0
        self.pending: wire.Pending | None = None

    def gather(self, begin: Callable[[], wire.Pending]) -> wire.Pending:
        """What `begin` begins, or has begun for another layer; the last one keeps nothing."""
        self.users -= 1
        pending = cache(begin()) if self.pending is None else self.pending
        self.pending = pending if self.users > 0 else None
        return pending


class _Entered(NamedTuple):
    """A layer's input in the forms that GEMMs and backward read."""

    #: Gives what fprop reads, with all tokens.
    whole: wire.Pending
    #: This rank's part of what wgrad consumes; None where it does not run.
    kept: Tensor | Quantized | None
    of_wgrad: WholeOfWgrad


def _overlapped(ranks: Ranks, y: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a GEMM within which tokens travel."""
    run = _product_of_all if ranks.layout.column else overlapping.scattered_product
    output: Tensor = run(y, held, ranks.group, ranks.batches)
    return output if bias is None else output + bias


def _product_of_all(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    return overlapping.gathered_product(x, weight, group, batches)[1]


def _enter(call: Call, ranks: Ranks, y: Tensor, keeps: bool, overlaps: bool) -> _Entered:
    """Quantize a layer's input and begin to put it together, once for layers of one input that read it alike.

    Args:
        overlaps: whether the GEMM puts it together, of each layer anew.
    """
    a, source, facts = call.recipe.fprop.a, ranks.source, ()
    # Backward needs nothing of it.
    ranks.source = None
    if overlaps:
        of_wgrad = WholeOfWgrad()
        of_wgrad.users = int(keeps)
        return _Entered(lambda: y, call.turned(y, y)[0] if keeps else None, of_wgrad)
    if source is not None and may_share(call, source, y):
        facts = facts_of(source, call, y)
        facts = ("in parts", ranks.layout, ranks.group, keeps, *facts) if facts else ()
    noted = siblings.lookup(source, facts, call.recipe, siblings.alike) if source is not None and facts else None
    if noted is not None and noted.operands is not None:
        entered, q = noted.operands
        note((call,), q)
    else:
        q = y if a is None else quantize(call, amax.INPUT, "input", y, a)
        kept = call.turned(y, q)[0] if keeps else None
        entered = _Entered(cache(ranks.gather("input", q)), kept, WholeOfWgrad())
        if source is not None and facts:
            siblings.remember(source, facts, call.recipe, (entered, q))
    entered.of_wgrad.users += keeps
    result: _Entered = entered
    return result


def product(
    call: Call,
    gemm: GemmSpec,
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias."""
    if isinstance(a, Quantized):
        return call.matmul(a, b, dtype, bias, gemm.fast_accum)
    assert isinstance(b, Tensor)
    return plain_product(a, b, dtype, bias)


def plain_product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [m, k] @ b [n, k].T + bias, unquantized."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is b.dtype is not dtype and bias is None:
        # In float32 it would take many times as long.
        return torch.mm(a, b.t(), out_dtype=dtype)
    return high_precision(a, b, dtype, bias)


def of_sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype of each rank's part of a sum."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def backward(ctx: Any, tensors: Any, g: Tensor) -> tuple[Any, ...]:
    """The gradients of what `LinearInParts` takes, from what it saved."""
    call, ranks, of_wgrad, layouts, shape, weight_dtype, bias_dtype = ctx.constants
    held, (kept,) = tensors[0], unpack(tensors[1:], layouts)
    _, _, _, need_input, need_weight, need_bias = ctx.needs_input_grad
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    if call.owed is not None:
        call.owed.settle()
    g = matrix(g)
    column = ranks.layout.column
    overlaps = need_input and ranks.overlaps(g, held, dgrad)
    grad_input: Any = None
    whole: Tensor | None = None
    if overlaps and not column:
        whole, grad_input = overlapping.gathered_product(g, held.t(), ranks.group, ranks.batches)
    operands = _Gradient(call, ranks, g, need_input, need_weight, whole)
    whole_input = None
    if need_weight:
        whole_input = of_wgrad.gather(partial(ranks.gather, "input" if wgrad.b is None else "input.T", kept))
    grad_weight = grad_bias = None
    if overlaps and column:
        grad_input = overlapping.scattered_product(g, held.t(), ranks.group, ranks.batches)
    elif need_input and not overlaps:
        if dgrad.b is None:
            of_weight: Tensor | Quantized = call.plain_weight(held, g.dtype).t()
        else:
            of_weight = quantized_weight(call, held, "dgrad", dgrad.b)
        grad_input = product(call, dgrad, operands.of_dgrad(), of_weight, of_sums(call.dtype) if column else call.dtype)
        if column:
            grad_input = ranks.sum(grad_input)
    if need_bias:
        grad_bias = _bias_gradient(ranks, g, bias_dtype)
    if whole_input is not None:
        x = whole_input()
        b = plain(x, g.dtype).t() if wgrad.b is None else x
        grad_weight = product(call, wgrad, operands.of_wgrad(), b, weight_dtype)
        if ranks.is_quantizable:
            kept_weights.used(ranks.layer)
    if grad_input is not None:
        if column and not overlaps:
            grad_input = grad_input().to(call.dtype)
        grad_input = grad_input.view(shape)
    return None, None, None, grad_input, grad_weight, grad_bias


class _Gradient:
    """grad_output in the forms that dgrad and wgrad read, on its way between ranks."""

    def __init__(
        self, call: Call, ranks: Ranks, g: Tensor, need_input: bool, need_weight: bool, whole: Tensor | None
    ) -> None:
        a, c, reuses = call.recipe.dgrad.a, call.recipe.wgrad.a, call.plan.grad_output
        self.reuses = reuses
        self.codes = self.turned = self.plain = None
        if a is not None and (need_input or (need_weight and reuses)):
            self.codes = cache(
                ranks.gather("grad_output", quantize(call, amax.GRAD_OUTPUT, "grad_output", g, a, False))
            )
        if need_weight and c is not None and not reuses:
            turned = quantize(call, amax.GRAD_OUTPUT, "grad_output.T", g.t(), c, True)
            self.turned = ranks.gather("grad_output.T", turned)
        if whole is not None:
            # dgrad has put it together.
            self.plain = lambda: whole
        elif (need_input and a is None) or (need_weight and c is None):
            self.plain = cache(ranks.gather("grad_output", g))

    def of_dgrad(self) -> Tensor | Quantized:
        """[T, N]."""
        of = self.plain if self.codes is None else self.codes
        assert of is not None
        value: Tensor | Quantized = of()
        return value

    def of_wgrad(self) -> Tensor | Quantized:
        """[N, T]."""
        if self.turned is not None:
            turned: Quantized = self.turned()
            return turned
        if self.reuses:
            assert self.codes is not None
            codes: Quantized = self.codes().T
            return codes
        assert self.plain is not None
        plain: Tensor = self.plain().t()
        return plain


def _bias_gradient(ranks: Ranks, g: Tensor, dtype: torch.dtype) -> Tensor:
    """g [T, N] summed over the tokens of all ranks that have some."""
    own = dtype if ranks.layout.axis("grad_output") != 0 else of_sums(dtype)
    total = ops.bias_gradient(g, own) if own in ops.DTYPES and g.dtype in ops.DTYPES else g.sum(0, dtype=own)
    if ranks.layout.axis("grad_output") == 0:
        total = wire.sum_parts(total, ranks.group, "gradients")()
    return total.to(dtype)
