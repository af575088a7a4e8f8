"""A plain linear layer in one process that splits sums as several ranks do.

Every operand is quantized unsharded by `quaver.torch.quantize`. A contraction over a sharded dimension is computed as
one product per rank; the products are added in float32 and rounded once.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.reference import operations
from quaver.torch.numerics.quantized import Quantized


def cut(q: Quantized, i: int, ranks: int, pieces: Sequence[int] = ()) -> Quantized:
    """Shard i of an operand along k, taken separately from each of the consecutive pieces."""
    rows, k = q.shape
    axis = int(not q.transposed)

    def shard(x: Tensor) -> Tensor:
        # One byte or one scale covers several elements.
        many, taken, before = k // x.shape[axis] if x.shape[axis] else 1, [], 0
        for piece in pieces or (k,):
            each = piece // ranks
            taken.append(x.narrow(axis, (before + i * each) // many, each // many))
            before += piece
        return torch.cat(taken, axis).contiguous()

    scale = q.scale
    if isinstance(scale, Tensor) and q.spec.block[1] is not None:
        scale = shard(scale)
    return Quantized(shard(q.data), scale, q.spec, (rows, k // ranks), q.transposed, q.tensor_factor)


def parts_of(x: Tensor, dim: int, ranks: int, pieces: Sequence[int] = ()) -> list[Tensor]:
    """Split x along a dimension, separately for each of the consecutive pieces."""
    each = [piece.chunk(ranks, dim) for piece in x.split([*(pieces or (x.shape[dim],))], dim)]
    return [torch.cat(own, dim) for own in zip(*each, strict=True)]


def tokens(x: Tensor, i: int, ranks: int) -> Tensor:
    """Rank i's tokens of [B, S, n]."""
    return x.chunk(ranks, 1)[i]


class SplitLinear(nn.Module):
    """Compute a linear layer as `ranks` ranks do, with or without a recipe.

    Args:
        layer: provides the weight, bias and name.
        column: whether dgrad's contraction is sharded (column-parallel), else fprop's (row-parallel).
        sequence: whether tokens are sharded, which affects only the order of the bias gradient's sum.
        pieces: rows of each of several matrices fused in one weight, which are sharded separately.
    """

    def __init__(
        self,
        layer: nn.Linear,
        recipe: Recipe | None,
        ranks: int,
        column: bool,
        sequence: bool,
        pieces: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.pieces = pieces
        self.weight, self.bias = layer.weight, layer.bias
        self.name = layer.__dict__.get("qualified_name")
        self.recipe, self.ranks, self.column, self.sequence = recipe, ranks, column, sequence
        self.counts = {"grad_output": 0, "grad_output.T": 0}
        length = 1 if recipe is None or recipe.delayed is None else recipe.delayed.length
        self.windows = {name: np.zeros(length, np.float32) for name in ("input", "weight", "grad_output")}
        self.factors = dict.fromkeys(self.windows, np.float32(0))

    def roll(self) -> None:
        """End a step of delayed scaling."""
        recipe = self.recipe
        if recipe is None or recipe.delayed is None:
            return
        for (name, window), spec in zip(self.windows.items(), recipe.history_specs, strict=True):
            args = window, self.factors[name], recipe.delayed, spec.format, spec.power_of_two
            self.windows[name], self.factors[name] = operations.roll(*args)

    def quantize(self, operand: str, x: Tensor, spec: QuantSpec | None) -> Any:
        if spec is None:
            return x
        name, noise, factor = operand.partition(".")[0], {}, None
        if spec.rounding == "stochastic":
            stream = zlib.crc32(f"{self.name}.{operand}".encode())
            noise = {"seed": 0, "tensor_id": stream, "count": self.counts[operand]}
            self.counts[operand] += 1
        delayed = self.recipe is not None and self.recipe.delayed is not None
        if delayed:
            factor = float(self.factors[name])
        q = qt.quantize(x, spec, factor=factor, **noise)
        if delayed:
            self.windows[name] = operations.record(self.windows[name], float(q.amax))
        return q

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Split.apply(x, self.weight, self.bias, self)
        return y


def product(
    a: Any, b: Any, dtype: torch.dtype, parts: int, bias: Tensor | None = None, pieces: Sequence[int] = ()
) -> Tensor:
    """a [m, k] @ b [n, k].T + bias, with the contraction split into this many products."""
    if parts == 1:
        if isinstance(a, Quantized):
            return qt.matmul(a, b, dtype, bias)
        return high(a, b, dtype, bias)
    total: Any = None
    for i in range(parts):
        if isinstance(a, Quantized):
            part = qt.matmul(cut(a, i, parts, pieces), cut(b, i, parts, pieces), torch.float32)
        else:
            part = high(*(parts_of(x, 1, parts, pieces)[i] for x in (a, b)), torch.float32)
        total = part if total is None else total + part
    return (total if bias is None else total + bias).to(dtype)


def high(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    if a.dtype is b.dtype is dtype:
        return torch.nn.functional.linear(a, b, bias)
    y = a.float() @ b.float().t()
    return (y if bias is None else y + bias).to(dtype)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLinear) -> Tensor:
        none = GemmSpec(None, None)
        recipe: Any = layer.recipe
        fprop, dgrad, wgrad = (none,) * 3 if recipe is None else (recipe.fprop, recipe.dgrad, recipe.wgrad)
        y = x.reshape(-1, x.shape[-1])
        a = layer.quantize("input", y, fprop.a)
        of_wgrad = a.T if recipe is not None and recipe.reuse.input else layer.quantize("input.T", y.t(), wgrad.b)
        b = layer.quantize("weight", weight.detach(), fprop.b)
        of_dgrad: Any = None
        if recipe is None or not recipe.reuse.weight:
            of_dgrad = layer.quantize("weight.T", weight.detach().t(), dgrad.b)
        else:
            of_dgrad = b.T
        ctx.kept = layer, dgrad, wgrad, of_wgrad, of_dgrad
        z = product(a, b, x.dtype, 1 if layer.column else layer.ranks, None if bias is None else bias.detach())
        return z.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        layer, dgrad, wgrad, of_wgrad, of_dgrad = ctx.kept
        h = g.reshape(-1, g.shape[-1])
        a = layer.quantize("grad_output", h, dgrad.a)
        grad_x = product(a, of_dgrad, g.dtype, layer.ranks if layer.column else 1, None, layer.pieces)
        c = (
            a.T
            if layer.recipe is not None and layer.recipe.reuse.grad_output
            else layer.quantize("grad_output.T", h.t(), wgrad.a)
        )
        grad_weight = product(c, of_wgrad, layer.weight.dtype, 1)
        if layer.bias is None:
            grad_bias: Any = None
        elif layer.sequence and not layer.column:
            parts = [tokens(g, i, layer.ranks).flatten(0, 1).sum(0, dtype=torch.float32) for i in range(layer.ranks)]
            grad_bias = torch.stack(parts).sum(0).to(layer.bias.dtype)
        else:
            grad_bias = h.sum(0, dtype=torch.float32).to(layer.bias.dtype)
        return grad_x.view(*g.shape[:-1], -1), grad_weight, grad_bias, None
