"""Plan of a tensor-parallel linear layer: the general plan with communication around its GEMMs.

    Column   y = gather(x) @ weight.T + bias            grad_x = sum over ranks (g @ weight)
    Row      y = sum over ranks (x @ weight.T) + bias   grad_x = gather(g) @ weight

All-gathers send codes and scales, or values that the recipe does not quantize; they begin as soon as an operand is
quantized, and the GEMM that reads it waits for them: an operand is a function that waits. With overlap it may be a
`ChunkedGather`, which a GEMM reads in chunks, and sums are sent in chunks. A tensor in its place means that the GEMM
itself communicates (symmetric memory). Sums are in float32 and rounded once, except with symmetric memory. The forward
saves only this rank's shard of the wgrad input, and backward gathers it again. Codes, scales and noise are those of a
single process. So are the GEMM results, except for the order of sums over ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.spec import GemmSpec, Recipe
from quaver.torch.linear import general
from quaver.torch.linear.plan import LinearCall, LinearPlan, Operands, WeightOperands
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops
from quaver.torch.parallel import comm
from quaver.torch.parallel.tensor.gemms import TensorParallelComm
from quaver.torch.parallel.tensor.overlap import gemm_of_gathered, scatter_products
from quaver.torch.parallel.tensor.symmetric_memory import gathered_product, scattered_product
from quaver.torch.state import observer, selective_checkpoint


def plan_for(recipe: Recipe, x: Tensor) -> LinearPlan:
    """Return the plan of tensor-parallel layers for inputs like x."""
    plan = general.plan_for(recipe, x)
    assert plan.operations is not None
    return replace(
        plan,
        # A scale that ranks share follows from their largest amax, so a matrix and its transpose are quantized
        # separately.
        operations=plan.operations._replace(both=None),
        quantize_input=quantize_input,
        transpose_input=transpose_input,
        gather_input=gather_input,
        load_input=load_input,
        quantize_weight=quantize_weight,
        quantize_grad=quantize_grad,
        transpose_grad=transpose_grad,
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        finish=finish,
    )


# ---- input ----


def quantize_input(call: LinearCall, x: Tensor, save: bool) -> Operands:
    """Quantize this rank's shard of the input and start its all-gather."""
    ranks: TensorParallelComm = call.comm
    if ranks.is_fused(x, ranks.local_weight, call.recipe.fprop):
        # The GEMM gathers the input itself, separately for each layer.
        return x, None, x if save else None, GatheredWgradInput(), None
    return gather_input(call, x, general.quantize_input(call, x, False), save)


def gather_input(call: LinearCall, x: Tensor | None, operands: Operands, save: bool) -> Operands:
    """Start the all-gather of a quantized shard, and return it with the shard of the wgrad operand."""
    transposed = general.transpose_input(call, x, operands)[0] if save else None
    ranks: TensorParallelComm = call.comm
    pending = ranks.gather_for_gemm("input", operands[0], ranks.local_weight.shape[0], call.dtype)
    return pending, None, transposed, GatheredWgradInput(), operands[4]


def transpose_input(call: LinearCall, x: Tensor, operands: Operands) -> tuple[Any, None]:
    """Return this rank's shard of the wgrad operand."""
    call.comm.of_wgrad = operands[3]
    operands[3].users += 1
    return operands[2], None


def load_input(call: LinearCall, operand: Any) -> tuple[comm.Pending, None]:
    """Start the all-gather of the saved wgrad operand."""
    name = "input" if call.recipe.wgrad.b is None else "input.T"
    return call.comm.of_wgrad.gather(lambda: call.comm.gather(name, operand)), None


class GatheredWgradInput:
    """All-gather of the wgrad input, shared by layers with the same input."""

    __slots__ = ("pending", "users")

    def __init__(self) -> None:
        #: Number of backward calls that still need it.
        self.users = 0
        self.pending: comm.Pending | None = None

    def gather(self, begin: Any) -> comm.Pending:
        """Return the pending all-gather, started by `begin` at the first call; the last user drops the reference."""
        self.users -= 1
        pending = cache(begin()) if self.pending is None else self.pending
        self.pending = pending if self.users > 0 else None
        return pending


# ---- weight and grad_output ----


def quantize_weight(call: LinearCall, weight: Tensor) -> WeightOperands:
    """Return the fprop operand of this rank's weight; layers of torch have no weight cache."""
    return general.quantize_weight(call, weight) if call.comm.is_quantizable else WeightOperands(weight)


def quantize_grad(call: LinearCall, g: Tensor, needs: Sequence[Any], bias_dtype: Any) -> Operands:
    """Quantize this rank's shard of grad_output and start its all-gathers."""
    need_input, need_weight, need_bias = needs
    ranks: TensorParallelComm = call.comm
    recipe, whole = call.recipe, None
    dgrad_operand: Any = None
    if need_input and ranks.is_fused(g, ranks.local_weight, recipe.dgrad):
        dgrad_operand = g
        if not ranks.layout.column:
            whole, dgrad_operand = gathered_product(g, ranks.local_weight.t(), ranks.group, ranks.batches)
    q: Any = general.quantize_grad(call, g, (need_input, need_weight, False), None)[0]
    codes: Any = None
    plain: Any = None
    transposed: Any = None
    if isinstance(q, Quantized):
        codes = ranks.gather_for_gemm("grad_output", q, ranks.local_weight.shape[1], call.dtype)
    if whole is not None:
        # dgrad has gathered it already.
        plain = cache(lambda: whole)
    elif (need_weight and recipe.wgrad.a is None) or (need_input and dgrad_operand is None and codes is None):
        plain = ranks.gather_for_gemm("grad_output", g, ranks.local_weight.shape[1], call.dtype)
    if need_weight and recipe.wgrad.a is None:
        transposed = _transposed(plain)
    elif need_weight and recipe.reuse.grad_output:
        transposed = _transposed(codes)
    elif need_weight:
        own = general.transpose_grad(call, g, (q, None, None, None, None))[0]
        transposed = ranks.gather("grad_output.T", own)
    if dgrad_operand is None:
        dgrad_operand = plain if codes is None else codes
    grad_bias = _bias_gradient(ranks, g, bias_dtype) if need_bias else None
    return dgrad_operand, None, transposed, None, grad_bias


def _transposed(pending: Any) -> comm.Pending:
    """Return the transpose of a pending operand."""
    return lambda: pending().T


def transpose_grad(call: LinearCall, g: Tensor, operands: Operands) -> tuple[Any, None]:
    """Return the pending wgrad operand grad_output.T."""
    return operands[2], None


def _bias_gradient(ranks: TensorParallelComm, g: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum g [T, N] over tokens, and over ranks if tokens are sharded."""
    own = dtype if ranks.layout.axis("grad_output") != 0 else accumulation_dtype(dtype)
    total = ops.bias_gradient(g, own) if own in ops.DTYPES and g.dtype in ops.DTYPES else g.sum(0, dtype=own)
    if ranks.layout.axis("grad_output") == 0:
        total = comm.sum_parts(total, ranks.group, "gradients")()
    return total.to(dtype)


# ---- GEMMs ----


def fprop(call: LinearCall, x: Any, _: None, weight: Any, __: None, bias: Tensor | None) -> Tensor:
    """Compute y from the pending input; x is a tensor if the GEMM itself communicates."""
    ranks: TensorParallelComm = call.comm
    column = ranks.layout.column
    if isinstance(x, Tensor):
        if column:
            y = gathered_product(x, weight, ranks.group, ranks.batches)[1]
        else:
            y = scattered_product(x, weight, ranks.group, ranks.batches)
        return y if bias is None else y + bias
    if column:
        return gemm_of_gathered(x, lambda rows: general.fprop(call, rows, None, weight, None, bias))
    total = _sum_of_products(call, call.recipe.fprop, x(), weight)()
    return (total if bias is None else total + bias).to(call.dtype)


def dgrad(call: LinearCall, g: Any, _: None, weight: Any, __: None, bias: None) -> Any:
    """Return grad_input, for a column layer its pending sum over ranks.

    g is a tensor if the GEMM itself communicates: of a row layer the product itself.
    """
    ranks: TensorParallelComm = call.comm
    if not ranks.layout.column:
        if isinstance(g, Tensor):
            return g
        return gemm_of_gathered(g, lambda rows: _product(call, call.recipe.dgrad, rows, weight, call.dtype))
    if isinstance(g, Tensor):
        return scattered_product(g, ranks.local_weight.t(), ranks.group, ranks.batches)
    return _sum_of_products(call, call.recipe.dgrad, g(), weight)


def wgrad(call: LinearCall, g: comm.Pending, _: None, x: comm.Pending, __: None, dtype: torch.dtype) -> Tensor:
    """Wait for grad_output.T and input.T and compute grad_weight of this rank's weight."""
    whole, gt = x(), g()
    if call.recipe.wgrad.b is None:
        whole = general.plain(whole, gt.dtype).t()
    grad_weight = _product(call, call.recipe.wgrad, gt, whole, dtype)
    if call.comm.is_quantizable:
        general.record_backward(call)
    return grad_weight


def finish(grad_input: Any, grad_weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Wait for the sum over ranks, which wgrad has overlapped."""
    return grad_input() if callable(grad_input) else grad_input, grad_weight


def _sum_of_products(call: LinearCall, gemm: GemmSpec, a: Any, b: Any) -> comm.Pending:
    """Compute this rank's part of a product and start the sum over ranks, with overlap chunk by chunk."""
    ranks: TensorParallelComm = call.comm
    dtype, chunks, measured = accumulation_dtype(call.dtype), list[Any](), observer.measures_gemms()
    if ranks.layout.sequence and not measured:
        chunks = ranks.chunks(a.shape[0] // ranks.number, a, b.shape[0], dtype)
    if chunks:
        return scatter_products(
            a, chunks, lambda rows: _product(call, gemm, rows, b, dtype), ranks.group, ranks.batches
        )
    y = _product(call, gemm, a, b, dtype)
    ranks.partial = y.clone() if measured else None
    return ranks.sum(y)


def _product(call: LinearCall, gemm: GemmSpec, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
    """Return a [m, k] @ b [n, k].T, quantized if a is."""
    hidden = bool(selective_checkpoint.thread.hidden)
    if isinstance(a, Quantized):
        multiply = ops.shown_matmul if hidden else call.operations.matmul
        return multiply(a, b, dtype, None, gemm.fast_accum)
    if hidden:
        return selective_checkpoint.seen(plain_product, a, b, dtype)
    return plain_product(a, b, dtype)


def plain_product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a [m, k] @ b [n, k].T + bias in high precision."""
    if a.is_cuda and dtype is torch.float32 and a.dtype is b.dtype is not dtype and bias is None:
        # bfloat16 operands with a float32 result; casting the operands to float32 would take many times as long.
        return torch.mm(a, b.t(), out_dtype=dtype)
    return general.high_precision(a, b, dtype, bias)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks compute partial sums: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
