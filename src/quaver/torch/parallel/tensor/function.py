"""Autograd functions of tensor-parallel linear layers, built of the same GEMMs as every linear layer.

    Column   y = gather(x) @ weight.T + bias        grad_x = sum over ranks (gather(g) @ weight)
    Row      y = sum over ranks (x @ weight.T) + bias   grad_x = gather(g) @ weight

All-gathers send codes and scales; sums are in float32 and rounded once. Backward saves only this rank's shard of the
wgrad input and gathers it again. Codes, scales and noise are those of a single process. So are the GEMM results, except
for the order of sums over ranks.
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
from quaver.torch.linear.autograd import InputOp, pack, record_input, shaped, share_conditions, unpack
from quaver.torch.linear.general import (
    high_precision,
    matrix,
    plain,
    plain_weight,
    quantize,
    quantized_weight,
    transpose_input,
)
from quaver.torch.linear.plan import LinearCall, LinearPlan
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import functional, ops
from quaver.torch.operations.autograd import NO_DOUBLE_BACKWARD, add, first_derivative
from quaver.torch.parallel import comm
from quaver.torch.parallel.comm import count_collective
from quaver.torch.parallel.tensor.gemms import TensorParallelComm
from quaver.torch.state import weight_cache
from quaver.torch.state.history import amax

# ---- overlap of communication and GEMMs ----
# An all-gather of tokens, or a reduce-scatter, inside the adjacent GEMM, by torch's operations on symmetric memory.
#
# A GPU multiplies one rank's tokens while those of the next arrive, and sends one rank's sums while it computes the
# next. Only high-precision operands are supported. Not tested on GPUs: tests run the fallbacks that torch provides on
# CPUs. Source: torch.distributed._symmetric_memory.

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def symmetric_memory() -> Any:
    """Import the torch module that defines the operations; None if this torch lacks it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory


def operation(name: str) -> Callable[..., Any] | None:
    """Return a symmetric-memory operation by name, or None if this torch does not define it."""
    return None if symmetric_memory() is None else getattr(torch.ops.symm_mem, name, None)


def reason_unsupported(mesh: Any) -> str:
    """Return why the ranks of a mesh cannot overlap, the same text on all of them, or "".

    Overlap needs GPUs of one machine with peer access over an NVLink switch.
    """
    reasons: list[Any] = [None] * mesh.size()
    dist.all_gather_object(reasons, (socket.gethostname(), _own_reason(mesh.device_type)), mesh.get_group())
    if len({host for host, _ in reasons}) > 1:
        return "the ranks are on several machines"
    return next((reason for _, reason in reasons if reason), "")


def _own_reason(kind: str) -> str:
    if kind != "cuda":
        return f"the mesh is on {kind}, and symmetric memory needs GPUs"
    missing = [name for name in (GATHER, SCATTER) if operation(name) is None]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{missing[0]}"
    here, count = torch.cuda.current_device(), torch.cuda.device_count()
    if not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here):
        return "GPUs of this machine have no peer access to one another"
    memory: Any = getattr(symmetric_memory(), "_SymmetricMemory", None)
    if memory is None or not memory.has_multicast_support(torch.autograd.DeviceType.CUDA, here):  # type: ignore[attr-defined]
        return "no NVLink switch connects the GPUs"
    return ""


def gathered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> tuple[Tensor, Tensor]:
    """All-gather tokens and multiply them by the weight in one operation.

    Args:
        x: this rank's tokens [T / ranks, k], of `batches` stacked sequences.
        weight: [n, k] in x's dtype.
        group: process group.
        batches: number of sequences.
    Returns:
        All tokens [T, k] in the order of one process, and the product [T, k] @ weight.T.
    Exact: the products of each rank's tokens.
    """
    run = operation(GATHER)
    assert run is not None
    with count_collective("activations", "gather", x, group):
        whole, (product,) = run(x.unflatten(0, (batches, -1)), [weight.t()], 1, group.group_name)
    return whole.flatten(0, 1), product.flatten(0, 1)


def scattered_product(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    """Return this rank's tokens of the sum over ranks of x [T, k] @ weight [n, k].T: [T / ranks, n] in x's dtype.

    Bounded: each rank's product is rounded to that dtype before the sum. The path without overlap, `comm.scatter_sums`,
    sums float32 products.
    """
    run = operation(SCATTER)
    assert run is not None
    with count_collective("activations", "scatter", x.new_empty((x.shape[0], weight.shape[0]), device="meta"), group):
        total: Tensor = run(x.unflatten(0, (batches, -1)), weight.t(), "sum", 1, group.group_name)
    return total.flatten(0, 1)


# ---- linear layers ----


class TensorParallelLinearFunction(torch.autograd.Function):
    """Autograd function of one tensor-parallel linear layer.

    Its inputs are the call's context and `TensorParallelComm`, the local weight twice, x [..., features] and the bias
    or None. The first weight is the very tensor in the DTensor; the second one receives the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: LinearCall,
        ranks: TensorParallelComm,
        local_weight: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        fprop, y = call.recipe.fprop, matrix(x)
        overlaps = ranks.overlaps(y, local_weight, fprop)
        shared = _enter(call, ranks, y, call.training and ctx.needs_input_grad[4], overlaps)
        if fprop.b is None:
            if call.training and ranks.is_quantizable:
                # No quantization looks at the weight here, so note the use for the weight cache.
                weight_cache.expire(ranks.layer, ranks.parameter)
            of_weight: Tensor | Quantized = local_weight
        else:
            of_weight = quantized_weight(call, local_weight, "fprop", fprop.b)
        if overlaps:
            output = _overlapped(ranks, y, local_weight, bias)
        elif ranks.layout.column:
            output = product(call, fprop, shared.whole(), of_weight, call.dtype, bias)
        else:
            total = ranks.sum(product(call, fprop, shared.whole(), of_weight, of_sums(call.dtype)))()
            output = (total if bias is None else total + bias).to(call.dtype)
        saved, layouts = pack([shared.saved_input])
        ctx.save_for_backward(local_weight, *saved)
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
    """All-gather of the wgrad input, shared by layers with the same input."""

    __slots__ = ("pending", "users")

    def __init__(self) -> None:
        #: Number of backward calls that still need it.
        self.users = 0
        self.pending: comm.Pending | None = None

    def gather(self, begin: Callable[[], comm.Pending]) -> comm.Pending:
        """Return the pending all-gather, started by `begin` at the first call; the last user drops the reference."""
        self.users -= 1
        pending = cache(begin()) if self.pending is None else self.pending
        self.pending = pending if self.users > 0 else None
        return pending


class _QuantizedShardInput(NamedTuple):
    """A layer's input in the forms that the GEMMs and backward use."""

    #: Waits for and returns the fprop input with all tokens.
    whole: comm.Pending
    #: This rank's shard of the wgrad input; None if wgrad does not run.
    saved_input: Tensor | Quantized | None
    of_wgrad: GatheredWgradInput


def _overlapped(ranks: TensorParallelComm, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a GEMM that overlaps with communication."""
    run = _product_of_all if ranks.layout.column else scattered_product
    output: Tensor = run(y, weight, ranks.group, ranks.batches)
    return output if bias is None else output + bias


def _product_of_all(x: Tensor, weight: Tensor, group: Any, batches: int) -> Tensor:
    return gathered_product(x, weight, group, batches)[1]


def _enter(
    call: LinearCall, ranks: TensorParallelComm, y: Tensor, save_input: bool, overlaps: bool
) -> _QuantizedShardInput:
    """Quantize a layer's input and start its all-gather, once for all layers that read the same input the same way.

    Args:
        call, ranks: the call.
        y: input as a matrix.
        save_input: also prepare this rank's shard for wgrad.
        overlaps: the GEMM gathers the input itself, separately for each layer.
    """
    a, source, conditions = call.recipe.fprop.a, ranks.source, ()
    # Backward does not need it, so free it.
    ranks.source = None
    if overlaps:
        of_wgrad = GatheredWgradInput()
        of_wgrad.users = int(save_input)
        return _QuantizedShardInput(lambda: y, _wgrad_input(call, y, y) if save_input else None, of_wgrad)
    shared = None if source is None else share_conditions(call, source, y)
    if shared is not None:
        conditions = ("in parts", ranks.layout, ranks.group, save_input, *shared)
    shared_quantization = (
        functional.lookup(source, conditions, call.plan, LinearPlan.quantizes_like)
        if source is not None and conditions
        else None
    )
    if shared_quantization is not None and shared_quantization.operands is not None:
        shard_input, q = shared_quantization.operands
        record_input((call,), q.amax)
    else:
        q = y if a is None else quantize(call, amax.INPUT, "input", y, a)
        saved_input = _wgrad_input(call, y, q) if save_input else None
        shard_input = _QuantizedShardInput(cache(ranks.gather("input", q)), saved_input, GatheredWgradInput())
        if source is not None and conditions:
            functional.remember(source, conditions, call.plan, (shard_input, q))
    shard_input.of_wgrad.users += save_input
    result: _QuantizedShardInput = shard_input
    return result


def _wgrad_input(call: LinearCall, y: Tensor | None, q: Any) -> Tensor | Quantized:
    """Return the wgrad operand of an input y with its fprop operand q."""
    return transpose_input(call, y, (q, None, None, None, None))[0]


def product(
    call: LinearCall,
    gemm: GemmSpec,
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a [m, k] @ b [n, k].T + bias, quantized if a is."""
    if isinstance(a, Quantized):
        return call.operations.matmul(a, b, dtype, bias, gemm.fast_accum)
    assert isinstance(b, Tensor)
    return plain_product(a, b, dtype, bias)


def plain_product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a [m, k] @ b [n, k].T + bias in high precision."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is b.dtype is not dtype and bias is None:
        # bfloat16 operands with a float32 result; casting the operands to float32 would take many times as long.
        return torch.mm(a, b.t(), out_dtype=dtype)
    return high_precision(a, b, dtype, bias)


def of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks compute partial sums: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def backward(ctx: Any, tensors: Any, g: Tensor) -> tuple[Any, ...]:
    """Return the gradients of `TensorParallelLinearFunction`'s inputs from its saved tensors."""
    call, ranks, of_wgrad, layouts, shape, weight_dtype, bias_dtype = ctx.constants
    local_weight, (saved_input,) = tensors[0], unpack(tensors[1:], layouts)
    _, _, _, need_input, need_weight, need_bias = ctx.needs_input_grad
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    if call.pending is not None:
        call.pending.finish()
    g = matrix(g)
    column = ranks.layout.column
    overlaps = need_input and ranks.overlaps(g, local_weight, dgrad)
    grad_input: Any = None
    whole: Tensor | None = None
    if overlaps and not column:
        whole, grad_input = gathered_product(g, local_weight.t(), ranks.group, ranks.batches)
    operands = _ShardedGradOutput(call, ranks, g, need_input, need_weight, whole)
    whole_input = None
    if need_weight:
        whole_input = of_wgrad.gather(partial(ranks.gather, "input" if wgrad.b is None else "input.T", saved_input))
    grad_weight = grad_bias = None
    if overlaps and column:
        grad_input = scattered_product(g, local_weight.t(), ranks.group, ranks.batches)
    elif need_input and not overlaps:
        if dgrad.b is None:
            of_weight: Tensor | Quantized = plain_weight(call, local_weight, g.dtype).t()
        else:
            of_weight = quantized_weight(call, local_weight, "dgrad", dgrad.b)
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
            weight_cache.record_backward(ranks.layer)
    if grad_input is not None:
        if column and not overlaps:
            grad_input = grad_input().to(call.dtype)
        grad_input = grad_input.view(shape)
    return None, None, None, grad_input, grad_weight, grad_bias


class _ShardedGradOutput:
    """grad_output in the forms that dgrad and wgrad use, with pending all-gathers."""

    def __init__(
        self,
        call: LinearCall,
        ranks: TensorParallelComm,
        g: Tensor,
        need_input: bool,
        need_weight: bool,
        whole: Tensor | None,
    ) -> None:
        a, c, reuses = call.recipe.dgrad.a, call.recipe.wgrad.a, call.recipe.plan.grad_output
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
            # dgrad has gathered it already.
            self.plain = lambda: whole
        elif (need_input and a is None) or (need_weight and c is None):
            self.plain = cache(ranks.gather("grad_output", g))

    def of_dgrad(self) -> Tensor | Quantized:
        """Wait for and return the dgrad operand [T, N]."""
        of = self.plain if self.codes is None else self.codes
        assert of is not None
        value: Tensor | Quantized = of()
        return value

    def of_wgrad(self) -> Tensor | Quantized:
        """Wait for and return the wgrad operand [N, T]."""
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
    """Sum g [T, N] over tokens, and over ranks if tokens are sharded."""
    own = dtype if ranks.layout.axis("grad_output") != 0 else of_sums(dtype)
    total = ops.bias_gradient(g, own) if own in ops.DTYPES and g.dtype in ops.DTYPES else g.sum(0, dtype=own)
    if ranks.layout.axis("grad_output") == 0:
        total = comm.sum_parts(total, ranks.group, "gradients")()
    return total.to(dtype)


# ---- norm and column layers ----
# A norm followed by column layers on sharded tokens, in one autograd function.
#
# On a GPU the norm kernel writes codes directly, and skips the high-precision output if nothing reads it. With a single
# scale for all tokens, ranks all-reduce the amax that the kernel found and a second pass casts. With row or block
# scales
# the first pass is the only one. The codes are then all-gathered.


class NormedLayerCall(NamedTuple):
    """One column layer of a fused norm."""

    call: LinearCall
    ranks: TensorParallelComm
    #: This rank's weight, the tensor inside the DTensor.
    local_weight: Tensor


class TensorParallelNormLinearFunction(torch.autograd.Function):
    """Autograd function of a norm followed by column layers.

    Its tensors are x [..., features] with this rank's tokens, gamma and beta or None, the layers' weights, and their
    biases or None. It returns the layers' outputs.

    Exact: the bits of the norm followed by each layer.
    """

    @staticmethod
    def forward(ctx: Any, norm: InputOp, layers: Sequence[NormedLayerCall], *tensors: Any) -> Any:
        count, inputs = len(layers), tensors[:3]
        needs = ctx.needs_input_grad[2:]
        q, saved_input, saved = _enter_normed(
            norm, layers, inputs, layers[0].call.training and any(needs[3 : 3 + count])
        )
        whole = cache(layers[0].ranks.gather("input", q))
        outputs = []
        for (call, ranks, local_weight), bias in zip(layers, tensors[3 + count :], strict=True):
            fprop = call.recipe.fprop
            assert fprop.b is not None
            of_weight = quantized_weight(call, local_weight, "fprop", fprop.b)
            y = product(call, fprop, whole(), of_weight, call.dtype, bias)
            outputs.append(shaped(y, ranks.shape(inputs[0].shape, y.shape[1])))
        packed, layouts = pack([saved_input, *saved])
        ctx.save_for_backward(*(layer.local_weight for layer in layers), *packed)
        dtypes = [None if t is None else t.dtype for t in tensors[3:]]
        ctx.constants = norm, layers, layouts, inputs[0].shape, dtypes
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(gs[0])):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, *gs)


def _enter_normed(
    norm: InputOp, layers: Sequence[NormedLayerCall], x: Sequence[Any], save_input: bool
) -> tuple[Quantized, Tensor | Quantized | None, Sequence[Any]]:
    """Run the norm and quantize its output. Returns codes, this rank's wgrad input, and the norm's saved tensors."""
    call, ranks = layers[0].call, layers[0].ranks
    a = call.recipe.fprop.a
    assert a is not None
    factor = None if call.factors is None else call.factors[amax.INPUT]
    is_set = call.factors is not None and amax.is_set(amax.INPUT, call.factors)
    ranks.check("input", x[0].shape[:-1].numel(), a, 0)
    want_output, want_transposed = save_input and not call.recipe.plan.input, save_input and call.recipe.plan.input
    fused = fused_quantize.operand(
        norm, x, x[0].shape[-1], a, factor, is_set, want_output, want_transposed, ranks.agreed_of
    )
    if fused is None:
        output, saved = norm.forward(*x)
        y = matrix(output)
        q = quantize(call, amax.INPUT, "input", y, a)
        saved_input = _wgrad_input(call, y, q) if save_input else None
    else:
        result, q, transposed = fused
        saved = result.saved
        if call.training and call.factors is not None:
            amax.record(call.layer, amax.INPUT, q.amax)
        saved_input = transposed
        if save_input and transposed is None:
            saved_input = _wgrad_input(call, None if result.y is None else matrix(result.y), q)
    record_input([layer.call for layer in layers[1:]], q.amax)
    return q, saved_input, saved


def _backward(ctx: Any, tensors: Sequence[Any], *gs: Tensor) -> tuple[Any, ...]:
    norm, layers, layouts, shape, dtypes = ctx.constants
    count, needs = len(layers), ctx.needs_input_grad[2:]
    saved_input, *saved = unpack(tensors[count:], layouts)
    of_wgrad = GatheredWgradInput()
    of_wgrad.users = sum(needs[3 : 3 + count])
    of_input = any(needs[:3])
    of_weights: list[Any] = [None] * count
    of_biases: list[Any] = [None] * count
    of_y: Tensor | None = None
    # Add gradients in autograd's order: the last computed layer first.
    for i in reversed(range(count)):
        one = SimpleNamespace()
        one.needs_input_grad = (False,) * 3 + (of_input, needs[3 + i], needs[3 + count + i])
        one.constants = layers[i].call, layers[i].ranks, of_wgrad, [], shape, dtypes[i], dtypes[count + i]
        *_, part, of_weights[i], of_biases[i] = backward(one, [tensors[i], saved_input], gs[i])
        if part is not None:
            of_y = part if of_y is None else add(of_y, part)
    of_x: Sequence[Any] = (None,) * 3
    if of_y is not None:
        of_x = norm.backward(of_y, saved)
    return None, None, *of_x, *of_weights, *of_biases
