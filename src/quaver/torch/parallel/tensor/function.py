"""The autograd function of a linear layer of which each rank has a part, composed of the GEMMs of every linear layer.

    Column   y = gather(x) @ weight.T + bias        grad_x = sum over ranks (gather(g) @ weight)
    Row      y = sum over ranks (x @ weight.T) + bias   grad_x = gather(g) @ weight

What is gathered travels as codes beside scales, and what is summed as float32, rounded once. Kept for backward is this
rank's part of what wgrad consumes, which is gathered there. The codes, scales and noise are those of a single process;
so are the products but for the order of the sums that several ranks share.
"""

import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver.recipes.spec import GemmSpec
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.linear.function import pack, shaped, unpack
from quaver.torch.linear.gemms import LinearContext, high_precision, matrix, plain, quantize, quantized_weight
from quaver.torch.linear.quantized_input import InputOp, facts_of, may_share, note
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import functional, ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, add, first_derivative
from quaver.torch.parallel import comm
from quaver.torch.parallel.comm import during
from quaver.torch.parallel.tensor.gemms import TensorParallelComm
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax

# ---- overlapping -----------------------------------------------------------------------------------------
# A gather of tokens, or a sum over ranks, within the GEMM beside it: torch's operations on symmetric memory.
#
# A GPU multiplies by the tokens of one rank while those of the next come, and sends one rank's sums while it computes
# the next one's. Only operands in high precision go so. Untried on GPUs: tests run what torch itself puts in their
# place elsewhere, on CPUs. Source: torch.distributed._symmetric_memory, whose operations these are.

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def symmetric_memory() -> Any:
    """torch's module, whose import defines the operations; None where this torch has none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def operation(name: str) -> Callable[..., Any] | None:
    """One of torch's; None where this torch does not define it."""
    return None if symmetric_memory() is None else getattr(torch.ops.symm_mem, name, None)


def reason_unsupported(mesh: Any) -> str:
    """What keeps the ranks of a mesh from it, the same on all of them; "" where nothing does.

    It takes GPUs of one machine that write into one another's memory over an NVLink switch.
    """
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, (socket.gethostname(), _own_reason(mesh.device_type)), mesh.get_group())
    if len({host for host, _ in told}) > 1:
        return "the ranks are on several machines"
    return next((reason for _, reason in told if reason), "")


def _own_reason(kind: str) -> str:
    if kind != "cuda":
        return f"the mesh is of {kind}, and symmetric memory is of GPUs"
    missing = [name for name in (GATHER, SCATTER) if operation(name) is None]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}"
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return "GPUs of this machine do not reach one another's memory"
    memory: Any = getattr(symmetric_memory(), "_SymmetricMemory", None)
    if memory is None or not memory.has_multicast_support(torch.autograd.DeviceType.CUDA, here):  # type: ignore[attr-defined]
        return "no NVLink switch joins the GPUs"
    return ""


def gathered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> tuple[Tensor, Tensor]:
    """All ranks' tokens, and what they are multiplied to.

    Args:
        x: this rank's [T / ranks, k], of so many sequences one after the other.
        weight: [n, k], of x's dtype.
    Returns:
        [T, k] in the order of one process, and [T, k] @ weight.T.
    Exact: the products of each rank's tokens.
    """
    run = operation(GATHER)
    assert run is not None
    with during("activations", "gather", x, group):
        whole, (product,) = run(x.unflatten(0, (batches, -1)), [weight.t()], 1, group.group_name)
    return whole.flatten(0, 1), product.flatten(0, 1)


def scattered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    """This rank's tokens of the sum over ranks of x [T, k] @ weight [n, k].T: [T / ranks, n] of x's dtype.

    Bounded: each rank's part is rounded to that dtype before it is summed, where `wire.scatter_sums` sums float32.
    """
    run = operation(SCATTER)
    assert run is not None
    with during("activations", "scatter", x.new_empty((x.shape[0], weight.shape[0]), device="meta"), group):
        total: Tensor = run(x.unflatten(0, (batches, -1)), weight.t(), "sum", 1, group.group_name)
    return total.flatten(0, 1)


# ---- function --------------------------------------------------------------------------------------------


class TensorParallelLinearFunction(torch.autograd.Function):
    """Of a call, its `Ranks`, this rank's weight twice, the input [..., features] and the bias or None: the output.

    The first weight is the very tensor that the DTensor holds, the second is what its gradient goes to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LinearContext,
        ranks: TensorParallelComm,
        held: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        fprop, y = call.recipe.fprop, matrix(x)
        overlaps = ranks.overlaps(y, held, fprop)
        shared = _enter(call, ranks, y, call.record and ctx.needs_input_grad[4], overlaps)
        if fprop.b is None:
            if call.record and ranks.is_quantizable:
                # Nothing else looks at the weight here.
                weight_cache.look(ranks.layer, ranks.parameter)
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


class GatheredWgradInput:
    """What wgrad consumes, put together once for the layers that share it."""

    __slots__ = ("pending", "users")

    def __init__(self) -> None:
        #: How many backwards have yet to ask.
        self.users = 0
        self.pending: comm.Pending | None = None

    def gather(self, begin: Callable[[], comm.Pending]) -> comm.Pending:
        """What `begin` begins, or has begun for another layer; the last one keeps nothing."""
        self.users -= 1
        pending = cache(begin()) if self.pending is None else self.pending
        self.pending = pending if self.users > 0 else None
        return pending


class _QuantizedShardInput(NamedTuple):
    """A layer's input in the forms that GEMMs and backward read."""

    #: Gives what fprop reads, with all tokens.
    whole: comm.Pending
    #: This rank's part of what wgrad consumes; None where it does not run.
    kept: Tensor | Quantized | None
    of_wgrad: GatheredWgradInput


def _overlapped(ranks: TensorParallelComm, y: Tensor, held: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a GEMM within which tokens travel."""
    run = _product_of_all if ranks.layout.column else scattered_product
    output: Tensor = run(y, held, ranks.group, ranks.batches)
    return output if bias is None else output + bias


def _product_of_all(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    return gathered_product(x, weight, group, batches)[1]


def _enter(
    call: LinearContext, ranks: TensorParallelComm, y: Tensor, keeps: bool, overlaps: bool
) -> _QuantizedShardInput:
    """Quantize a layer's input and begin to put it together, once for layers of one input that read it alike.

    Args:
        overlaps: whether the GEMM puts it together, of each layer anew.
    """
    a, source, facts = call.recipe.fprop.a, ranks.source, ()
    # Backward needs nothing of it.
    ranks.source = None
    if overlaps:
        of_wgrad = GatheredWgradInput()
        of_wgrad.users = int(keeps)
        return _QuantizedShardInput(lambda: y, call.transposed(y, y)[0] if keeps else None, of_wgrad)
    if source is not None and may_share(call, source, y):
        facts = facts_of(source, call, y)
        facts = ("in parts", ranks.layout, ranks.group, keeps, *facts) if facts else ()
    recorded_amax = (
        functional.lookup(source, facts, call.recipe, functional.alike) if source is not None and facts else None
    )
    if recorded_amax is not None and recorded_amax.operands is not None:
        entered, q = recorded_amax.operands
        note((call,), q)
    else:
        q = y if a is None else quantize(call, amax.INPUT, "input", y, a)
        kept = call.transposed(y, q)[0] if keeps else None
        entered = _QuantizedShardInput(cache(ranks.gather("input", q)), kept, GatheredWgradInput())
        if source is not None and facts:
            functional.remember(source, facts, call.recipe, (entered, q))
    entered.of_wgrad.users += keeps
    result: _QuantizedShardInput = entered
    return result


def product(
    call: LinearContext,
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
    if call.pending is not None:
        call.pending.settle()
    g = matrix(g)
    column = ranks.layout.column
    overlaps = need_input and ranks.overlaps(g, held, dgrad)
    grad_input: Any = None
    whole: Tensor | None = None
    if overlaps and not column:
        whole, grad_input = gathered_product(g, held.t(), ranks.group, ranks.batches)
    operands = _ShardedGradOutput(call, ranks, g, need_input, need_weight, whole)
    whole_input = None
    if need_weight:
        whole_input = of_wgrad.gather(partial(ranks.gather, "input" if wgrad.b is None else "input.T", kept))
    grad_weight = grad_bias = None
    if overlaps and column:
        grad_input = scattered_product(g, held.t(), ranks.group, ranks.batches)
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
            weight_cache.used(ranks.layer)
    if grad_input is not None:
        if column and not overlaps:
            grad_input = grad_input().to(call.dtype)
        grad_input = grad_input.view(shape)
    return None, None, None, grad_input, grad_weight, grad_bias


class _ShardedGradOutput:
    """grad_output in the forms that dgrad and wgrad read, on its way between ranks."""

    def __init__(
        self,
        call: LinearContext,
        ranks: TensorParallelComm,
        g: Tensor,
        need_input: bool,
        need_weight: bool,
        whole: Tensor | None,
    ) -> None:
        a, c, reuses = call.recipe.dgrad.a, call.recipe.wgrad.a, call.plan.grad_output
        self.reuses = reuses
        self.codes = self.transposed = self.plain = None
        if a is not None and (need_input or (need_weight and reuses)):
            self.codes = cache(
                ranks.gather("grad_output", quantize(call, amax.GRAD_OUTPUT, "grad_output", g, a, False))
            )
        if need_weight and c is not None and not reuses:
            transposed = quantize(call, amax.GRAD_OUTPUT, "grad_output.T", g.t(), c, True)
            self.transposed = ranks.gather("grad_output.T", transposed)
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
        if self.transposed is not None:
            transposed: Quantized = self.transposed()
            return transposed
        if self.reuses:
            assert self.codes is not None
            codes: Quantized = self.codes().T
            return codes
        assert self.plain is not None
        plain: Tensor = self.plain().t()
        return plain


def _bias_gradient(ranks: TensorParallelComm, g: Tensor, dtype: torch.dtype) -> Tensor:
    """g [T, N] summed over the tokens of all ranks that have some."""
    own = dtype if ranks.layout.axis("grad_output") != 0 else of_sums(dtype)
    total = ops.bias_gradient(g, own) if own in ops.DTYPES and g.dtype in ops.DTYPES else g.sum(0, dtype=own)
    if ranks.layout.axis("grad_output") == 0:
        total = comm.sum_parts(total, ranks.group, "gradients")()
    return total.to(dtype)


# ---- normed ----------------------------------------------------------------------------------------------
# Column layers behind a norm, of which each rank has some tokens: one autograd function, as without ranks.
#
# On a GPU the kernel that normalizes writes the codes, and what is in high precision of the norm's output is not
# written where nothing reads it. Where one scale serves all tokens, ranks agree on the amax that the kernel has found,
# and a second pass casts; where each row or block has its own, the first pass is the only one. The codes travel.


class NormedLayerCall(NamedTuple):
    """One of them in this call."""

    call: LinearContext
    ranks: TensorParallelComm
    #: This rank's weight, as the DTensor holds it.
    held: Tensor


class TensorParallelNormLinearFunction(torch.autograd.Function):
    """Of layers and their norm, x [..., features] of this rank's tokens, gamma and beta or None, the layers' weights,
    and their biases or None: the layers' outputs.

    Exact: the bits of the norm followed by each layer.
    """

    @staticmethod
    def forward(ctx: Any, prologue: InputOp, layers: Sequence[NormedLayerCall], *tensors: Any) -> Any:
        count, taken = len(layers), tensors[:3]
        needs = ctx.needs_input_grad[2:]
        q, kept, saved = _enter_normed(prologue, layers, taken, layers[0].call.record and any(needs[3 : 3 + count]))
        whole = cache(layers[0].ranks.gather("input", q))
        outputs = []
        for (call, ranks, held), bias in zip(layers, tensors[3 + count :], strict=True):
            fprop = call.recipe.fprop
            assert fprop.b is not None
            of_weight = quantized_weight(call, held, "fprop", fprop.b)
            y = product(call, fprop, whole(), of_weight, call.dtype, bias)
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


def _enter_normed(
    prologue: InputOp, layers: Sequence[NormedLayerCall], x: Sequence[Any], keeps: bool
) -> tuple[Quantized, Tensor | Quantized | None, Sequence[Any]]:
    """This rank's tokens of the layers' input, quantized; what wgrad consumes of them; and what the norm keeps."""
    call, ranks = layers[0].call, layers[0].ranks
    a = call.recipe.fprop.a
    assert a is not None
    factor = None if call.factors is None else call.factors[amax.INPUT]
    is_set = call.factors is not None and amax.is_set(amax.INPUT, call.factors)
    ranks.check("input", x[0].shape[:-1].numel(), a, 0)
    want_output, turn = keeps and not call.plan.input, keeps and call.plan.input
    fused = fused_quantize.operand(prologue, x, x[0].shape[-1], a, factor, is_set, want_output, turn, ranks.agreed_of)
    if fused is None:
        output, saved = prologue.forward(*x)
        y = matrix(output)
        q = quantize(call, amax.INPUT, "input", y, a)
        kept = call.transposed(y, q)[0] if keeps else None
    else:
        result, q, transposed = fused
        saved = result.saved
        if call.record and call.factors is not None:
            amax.record(call.layer, amax.INPUT, q.amax)
        kept = transposed
        if keeps and transposed is None:
            kept = call.transposed(None if result.y is None else matrix(result.y), q)[0]
    note([layer.call for layer in layers[1:]], q)
    return q, kept, saved


def _backward(ctx: Any, tensors: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    prologue, layers, layouts, shape, dtypes = ctx.constants
    count, needs = len(layers), ctx.needs_input_grad[2:]
    kept, *saved = unpack(tensors[count:], layouts)
    of_wgrad = GatheredWgradInput()
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
        *_, part, of_weights[i], of_biases[i] = backward(one, [tensors[i], kept], gs[i])
        if part is not None:
            of_y = part if of_y is None else add(of_y, part)
    of_x: Sequence[Any] = (None,) * 3
    if of_y is not None:
        of_x = prologue.backward(of_y, saved, None, needs[:3])
    return None, None, *of_x, *of_weights, *of_biases
