"""One GEMM an expert: rows of x that lie group by group, each group times a matrix of its own.

    fprop   y[t]      = x[t] @ w[e].T                    token t belongs to expert e
    dgrad   grad_x[t] = grad_y[t] @ w[e]
    wgrad   grad_w[e] = sum of grad_y[t] ⊗ x[t] over its tokens

Every expert's tokens and weight are operands of their own, with the bits of a linear layer that sees nothing else.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver import recipes
from quaver.core.spec import GemmSpec, Recipe
from quaver.torch.backends.gpu.launching.device import why_no_fp8
from quaver.torch.linear.gemms import LATER, high_precision
from quaver.torch.linear.grouped.operands import (
    Noise,
    quantize_experts,
    quantize_features,
    quantize_tokens,
    transposed,
)
from quaver.torch.numerics.groups import Groups, Offsets
from quaver.torch.numerics.quantized import put_together, take_apart
from quaver.torch.operations import ops
from quaver.torch.operations.derivatives import first_derivative, refuse_transforms
from quaver.torch.operations.operation import Impl, Operation
from quaver.torch.operations.selecting import unseen
from quaver.torch.state.context import ambient, recipe_in_force


def _no_gemms(a: Groups, b: Groups, offsets: Offsets, *_: Any) -> str:
    return why_no_fp8(offsets.ends.device, "native")


def _one_by_one(a: Groups, b: Groups, offsets: Offsets, n: int, dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
    # Zeros for tokens that have no group.
    y = torch.zeros((offsets.rows, n), dtype=dtype, device=offsets.ends.device)
    for group, (start, end) in enumerate(offsets.bounds()):
        left, right = a.of(group, (start, end)), b.of(group)
        if end > start and left is not None and right is not None:
            y[start:end] = ops.MATMUL(left, right, dtype, None, fast_accum)
    return y


#: Tokens of all groups by each group's matrix: (tokens, matrices, offsets, n, dtype, fast_accum) to [T, n].
GROUPED_MATMUL: Operation[Tensor] = Operation(
    "grouped_matmul",
    [
        Impl("native", f"{ops.GPU}.gemms.grouped_mm:matmul", f"{ops.GPU}.gemms.grouped_mm:reason", _no_gemms),
        Impl("group by group", _one_by_one),
    ],
    parts=ops.MATMUL,
)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    recipe: str | Recipe | None = None,
    seed: int = 0,
    count: Tensor | int = 0,
    name: str = "grouped",
) -> Tensor:
    """y[t] = x[t] @ weight[e].T for token t of group e, every operand quantized as the recipe says; differentiable.

    Args:
        x: [T, K], the tokens of group 0 first, then those of group 1, and so on.
        weight: [groups, N, K], of x's dtype, or under torch.autocast any.
        offsets: int32 [groups] on x's device, where each group ends: the running sum of the groups' sizes. A group may
            be empty; tokens beyond the last end give zeros. A native GEMM trusts them, since looking means waiting.
        recipe: a name or Recipe; None takes the ambient one, and none of that leaves the products unquantized.
        seed, count, name: of stochastic rounding's noise, which differs by step where count does.
    Returns:
        [T, N] in x's dtype. On a GPU a sum over the tokens of a group waits for the offsets, as does every GEMM that is
        not native.
    Raises:
        ValueError: shapes, dtypes or offsets that do not fit; delayed scaling, whose history no function keeps.
        NotImplementedError: under torch.compile, torch.func and forward mode.
    Exact: codes and scales, those of each group alone. Bounded: outputs and gradients, relative RMS 1e-6 in float32 of
    the same products in float64.
    """
    in_force = recipe_in_force(None if recipe is None else recipes.get(recipe))
    check(x, weight, offsets, in_force)
    device = ops.autocast_device(x)
    casting = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if casting else x.dtype
    if weight.dtype is not dtype and not casting:
        raise ValueError(f"x is {dtype} and weight {weight.dtype}; convert one of them, or enter torch.autocast")
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "grouped_matmul is not compiled yet: how many tokens a group has decides which operations run; without "
            "fullgraph=True it runs in eager mode"
        )
    refuse_transforms(x, weight)
    if in_force is None or not in_force.quantizes:
        weight = weight.to(dtype)
    followed, training = in_force or recipes.get("bf16"), torch.is_grad_enabled()
    setup = _Setup(followed, Offsets(offsets, x.shape[0]), dtype, seed, count, name, training)
    with ops.without_autocast(device):
        apply: Any = _Grouped.apply if ambient.split is None else ambient.split(_Grouped, _Grouped.apply)
        y: Tensor = apply(x.to(dtype), weight, setup)
    return y


def check(x: Tensor, weight: Tensor, offsets: Tensor, recipe: Recipe | None) -> None:
    """Refuse what does not fit, in a sentence."""
    if x.dim() != 2 or weight.dim() != 3 or offsets.shape != weight.shape[:1] or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x is [T, K], weight [groups, N, K] and offsets [groups]; these are {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(offsets.shape)}"
        )
    if offsets.dtype is not torch.int32:
        raise ValueError(f"offsets count tokens and are {offsets.dtype}; convert them to torch.int32")
    if offsets.device != x.device or weight.device != x.device:
        raise ValueError(
            f"x is on {x.device}, weight on {weight.device}, offsets on {offsets.device}; move them to one"
        )
    if x.dtype not in ops.DTYPES or weight.dtype not in ops.DTYPES:
        raise ValueError(f"x and weight are float32, bfloat16 or float16, not {x.dtype} and {weight.dtype}")
    if recipe is not None and recipe.delayed is not None:
        raise ValueError(
            f"recipe {recipe} scales by a history, which a function has no place for; use 'tensorwise' or 'rowwise'"
        )


class _Setup(NamedTuple):
    """Everything about one call that is no tensor to be differentiated."""

    recipe: Recipe
    offsets: Offsets
    dtype: torch.dtype
    seed: int
    step: Tensor | int
    name: str
    #: Whether gradients are switched on; what a tensor needs torch says as if they always were.
    training: bool

    def noise(self, operand: str) -> Noise:
        """The streams of an operand's groups."""
        first = zlib.crc32(f"{self.name}.{operand}".encode())
        return lambda group: (self.seed, (first + group) & 0xFFFFFFFF, self.step)


class _Grouped(torch.autograd.Function):
    """Saves plain tensors only: no wrapper subclass is on the way."""

    @staticmethod
    @unseen
    def forward(ctx: Any, x: Tensor, weight: Tensor, setup: _Setup) -> Tensor:
        gemm, wgrad, offsets = setup.recipe.fprop, setup.recipe.wgrad, setup.offsets
        need_input, need_weight = (setup.training and need for need in ctx.needs_input_grad[:2])
        plan = setup.recipe.plan
        a = None if gemm.a is None else quantize_tokens(x, gemm.a, offsets)
        b = None if gemm.b is None else quantize_experts(weight, gemm.b)
        y = _by_rows(a, b, x, weight, weight.shape[1], gemm, setup)
        kept_input: Groups | Tensor | None = None
        if need_weight:
            if wgrad.b is None:
                kept_input = x
            elif plan.input:
                assert a is not None
                kept_input = transposed(a, offsets.groups)
            else:
                kept_input = quantize_features(x, wgrad.b, offsets)
        kept_weight: Groups | Tensor | None = None
        if need_input:
            kept_weight = weight if not plan.weight or b is None else transposed(b, offsets.groups)
        ctx.setup, ctx.shape, ctx.weight_dtype = setup, weight.shape, weight.dtype
        ctx.constants = _save(ctx, kept_input, kept_weight)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with ops.without_autocast(ops.autocast_device(g)):
            return first_derivative(_backward, ctx, NO_DOUBLE_BACKWARD, g)


NO_DOUBLE_BACKWARD = (
    "quantized grouped GEMMs have no second derivative: rounding has none. Compute the part that is differentiated "
    "twice in high precision"
)


def _backward(ctx: Any, tensors: Sequence[Any], g: Tensor) -> Any:
    setup: _Setup = ctx.setup
    kept_input, kept_weight = _restore(ctx, tensors)
    dgrad, wgrad, offsets, plan = setup.recipe.dgrad, setup.recipe.wgrad, setup.offsets, setup.recipe.plan
    need_input, need_weight, _ = ctx.needs_input_grad
    of_input = gq = None
    of_weight: Any = None
    if dgrad.a is not None and (need_input or plan.grad_output):
        gq = quantize_tokens(g, dgrad.a, offsets, setup.noise("grad_output"))
    if need_input:
        turned = kept_weight.transpose(1, 2) if isinstance(kept_weight, Tensor) else None
        b = kept_weight
        if turned is not None:
            b = None if dgrad.b is None else quantize_experts(turned, dgrad.b)
        of_input = _by_rows(gq, b, g, turned, ctx.shape[2], dgrad, setup)
    if need_weight:
        a: Groups | Tensor = g
        if plan.grad_output:
            assert gq is not None
            a = transposed(gq, offsets.groups)
        elif wgrad.a is not None:
            a = quantize_features(g, wgrad.a, offsets, setup.noise("grad_output.T"))
        gives = partial(_by_tokens, a, kept_input, wgrad, setup, ctx.shape, dtype=ctx.weight_dtype)
        of_weight = gives if need_weight is LATER else gives()
    return of_input, of_weight, None


def _by_rows(
    a: Groups | None, b: Groups | None, x: Tensor, w: Tensor | None, n: int, gemm: GemmSpec, setup: _Setup
) -> Tensor:
    """[T, n]: tokens, quantized or x [T, k], by each group's matrix, quantized or w [groups, n, k]."""
    if a is not None and b is not None:
        return GROUPED_MATMUL(a, b, setup.offsets, n, setup.dtype, gemm.fast_accum)
    assert w is not None
    y = x.new_zeros((x.shape[0], n), dtype=setup.dtype)
    for group, (start, end) in enumerate(setup.offsets.bounds()):
        if end > start:
            y[start:end] = high_precision(x[start:end], w[group], setup.dtype)
    return y


def _by_tokens(
    a: Groups | Tensor, b: Groups | Tensor, gemm: GemmSpec, setup: _Setup, shape: Sequence[int], *, dtype: torch.dtype
) -> Tensor:
    """[groups, n, k], summed over each group's tokens: grad_output.T [n, tokens] by input.T [k, tokens]."""
    # Zeros for groups that have no tokens.
    y = torch.zeros(tuple(shape), dtype=dtype, device=setup.offsets.ends.device)
    for group, (start, end) in enumerate(setup.offsets.bounds()):
        if end == start:
            continue
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor)
            y[group] = high_precision(a[start:end].t(), b[start:end].t(), dtype)
        else:
            assert isinstance(b, Groups)
            left, right = a.of(group), b.of(group)
            if left is not None and right is not None:
                y[group] = ops.MATMUL(left, right, dtype, None, gemm.fast_accum)
    return y


def _save(ctx: Any, *kept: Groups | Tensor | None) -> list[Any]:
    """Tensors to autograd; how they are put together again is returned."""
    layouts: list[Any] = []
    tensors: list[Tensor | None] = []
    for value in kept:
        operands = value.parts if isinstance(value, Groups) else [value]
        taken = [take_apart(operand) for operand in operands]
        layouts.append((isinstance(value, Groups), [(len(parts), layout) for parts, layout in taken]))
        tensors += [part for parts, _ in taken for part in parts]
    ctx.save_for_backward(*tensors)
    return layouts


def _restore(ctx: Any, tensors: Sequence[Any]) -> list[Any]:
    operands = []
    for of_groups, layouts in ctx.constants:
        values = []
        for parts, constants in layouts:
            values.append(put_together(constants, tensors[:parts]))
            tensors = tensors[parts:]
        operands.append(Groups(None, values) if of_groups else values[0])
    return operands
