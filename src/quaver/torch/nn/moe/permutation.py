"""Permute tokens into the order of their experts, and sum the experts' outputs back per token.

    permute      rows[places[t k + j]] = x[t]                          for each token t and each of its k choices j
    unpermute    y[t] = Σ_j weights[t, j] · rows[places[t k + j]]      added in the order of j, in float32

Without weights, each is the other's derivative. The number of rows does not depend on the routing, and the GPU is never
synchronized: torch.compile sees one graph, and a CUDA graph can replay it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import check_instance
from quaver.reference.moe import check_permute, check_unpermute, rows_of, why_not_rows
from quaver.torch.backends.gpu import fused_quantize
from quaver.torch.linear.autograd import may_fuse
from quaver.torch.nn.activation import ActivationInputOp, get_activation
from quaver.torch.numerics.grouped import by_rows
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.operations.operation import Implementation, Operation
from quaver.torch.operations.ops import on_host

# ---- permute and unpermute ----

NO_TRANSFORMS = (
    "permute and unpermute do not run under torch.func transforms such as vmap and grad, and have no forward-mode "
    "derivative; loop over the batch and use torch.autograd, which differentiates them any number of times"
)


class Permuted(NamedTuple):
    """Tokens in the order of their experts."""

    #: [rows, H], of x's dtype or `Quantized`. Expert 0's rows come first; within an expert they follow the token order.
    #: Rows of padding and rows after the last expert's end are zero.
    rows: Any
    #: int32 [experts]: end of each expert's rows, including padding, as `grouped_matmul` takes them.
    offsets: Tensor
    #: int64 [T * k], by token and choice: the row of each choice, -1 if it was dropped.
    places: Tensor


def permute(
    x: Tensor | Quantized, indices: Tensor, experts: int, *, pad: int = 1, capacity: int | None = None
) -> Permuted:
    """Copy each token's row to each expert that it chose.

    Args:
        x: [T, H], differentiable; or `Quantized` with blocks within a row or one scale per tensor, whose codes and
            scales are copied as bytes. That equals quantizing the permuted rows, at 1/k of the work and of the bytes
            read.
        indices: int64 or int32 [T, k], from `route`. A number outside [0, experts) is a choice of an expert on another
            rank.
        experts: number of experts.
        pad: each expert's rows are padded with zeros to a multiple of it.
        capacity: maximum number of choices per expert; the first tokens have priority, the rest is dropped. None drops
            none.
    Returns:
        `Permuted`: rows, offsets and places. Number of rows: T k + min(T k, experts) (pad - 1) rows, rounded down to
        a multiple of pad; with a capacity at most the capacity of all experts.
    Raises:
        ValueError: shapes that do not fit, a capacity or pad below one, or an operand with blocks of several rows.
    Exact: the rows, and the gradient of x, which sums the copies' gradients in float32 in the order of choices and
    rounds once.
    """
    if not isinstance(x, Quantized):
        check_instance("permute", "x", x, Tensor, "torch.randn(tokens, features)")
    check_instance("permute", "indices", indices, Tensor, "quaver.torch.route(logits, k).indices")
    integers = indices.dtype in (torch.int64, torch.int32)
    check_permute(tuple(indices.shape), integers, experts, pad, capacity)
    if isinstance(x, Quantized):
        why = why_not_rows(x.spec)
        if why:
            raise ValueError(why)
    tokens = x.shape[0]
    if len(x.shape) != 2 or tokens != indices.shape[0]:
        raise ValueError(
            f"x is [T, H] and indices [T, k] of the same tokens; these are {tuple(x.shape)}, {tuple(indices.shape)}"
        )
    _refuse_transforms(x if isinstance(x, Tensor) else None)
    offsets, places, sources = order(indices, experts, pad, capacity)
    if isinstance(x, Quantized):
        return Permuted(gather_quantized(x, sources, indices.shape[1]), offsets, places)
    rows: Tensor = GatherRows.apply(x, None, sources, places, indices.shape[1])
    return Permuted(rows, offsets, places)


def unpermute(rows: Tensor, places: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Sum each token's k rows, each multiplied by its weight.

    Args:
        rows: [rows, H], differentiable.
        places: [T * k] from `permute`.
        k: choices per token.
        weights: [T, k], differentiable; None is 1 for each. The products are computed in float32.
    Returns:
        [T, H] in rows' dtype. A dropped choice adds nothing.
    Raises:
        ValueError: shapes that do not fit.
    Exact: products and sum, in the order of choices, are computed in float32 (float64 for float64), rounded once.
    """
    check_instance("unpermute", "rows", rows, Tensor, "those of permute")
    check_instance("unpermute", "places", places, Tensor, "those of permute")
    return sum_choices(rows, None, places, k, weights)


def sum_choices(rows: Tensor, sources: Tensor | None, places: Tensor, k: int, weights: Tensor | None) -> Tensor:
    """Run `unpermute`; sources, the choice of each row, are computed in backward if they are None."""
    weights_shape = None if weights is None else tuple(weights.shape)
    integers = places.dtype in (torch.int64, torch.int32)
    check_unpermute(tuple(rows.shape), tuple(places.shape), integers, k, weights_shape)
    _refuse_transforms(rows, weights)
    y: Tensor = CombineRows.apply(rows, None if weights is None else weights.reshape(-1), sources, places, k)
    return y


def _refuse_transforms(*tensors: Tensor | None) -> None:
    if not is_tracing():
        refuse_transforms(*tensors, sentence=NO_TRANSFORMS)


def order(indices: Tensor, experts: int, pad: int = 1, capacity: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the permutation: offsets and places as in `Permuted`, and the choice of each row, -1 for an empty row.

    Exact: `quaver.reference.moe.places`.
    """
    flat = indices.reshape(-1)
    return ORDER(flat, experts, pad, capacity, rows_of(flat.shape[0], experts, pad, capacity))


def _order(indices: Tensor, experts: int, pad: int, capacity: int | None, total: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = indices.to(torch.int64)
    count, device = flat.shape[0], flat.device
    numbers = torch.arange(experts, dtype=torch.int64, device=device)
    ids, by_expert = torch.sort(flat, stable=True)
    begin = torch.searchsorted(ids, numbers)
    sizes = torch.searchsorted(ids, numbers, right=True) - begin
    if capacity is not None:
        sizes = sizes.clamp(max=capacity)
    ends = torch.cumsum((sizes + (pad - 1)) // pad * pad, 0)
    # Difference between an expert's first row and the index of its first choice in sorted order.
    row_offset = ends - (sizes + (pad - 1)) // pad * pad - begin
    expert = ids.clamp(0, experts - 1)
    position = torch.arange(count, dtype=torch.int64, device=device)
    row = position + row_offset[expert]
    valid = ids == expert
    if capacity is not None:
        valid = valid & (position - begin[expert] < capacity)
    row = torch.where(valid, row, -1)
    places = torch.empty_like(row).scatter(0, by_expert, row)
    # One extra row receives the dropped choices and is cut off.
    sources = torch.full((total + 1,), -1, dtype=torch.int64, device=device)
    sources = sources.scatter(0, torch.where(valid, row, total), by_expert)[:total]
    return ends.to(torch.int32), places, sources


_GPU = f"{ops.GPU}.permutation"
#: Permutation of choices: (indices [T k], experts, pad, capacity or None, number of rows) -> results of `order`.
ORDER: Operation[tuple[Tensor, Tensor, Tensor]] = Operation(
    "order_choices",
    [
        Implementation("triton", f"{_GPU}:order", f"{_GPU}:reason_order", ops.no_kernels),
        Implementation("reference", _order),
    ],
    traced=_order,
)

# ---- gather, weighted sum and dot products of rows; the derivatives of each are others of them ----


def _gather(x: Tensor, sources: Tensor, k: int, weights: Tensor | None = None, fill: float = 0) -> Tensor:
    if not x.shape[0]:
        return x.new_full((sources.shape[0], x.shape[1]), fill)
    choice = sources.clamp(min=0)
    rows = x.index_select(0, choice // k)
    if weights is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = (rows.to(wide) * weights.to(wide)[choice].unsqueeze(1)).to(x.dtype)
    empty = sources < 0
    return rows.masked_fill_(empty.unsqueeze(1), fill) if _may_have_true(empty) else rows


def _may_have_true(mask: Tensor) -> bool:
    """Return True if a mask may have a True element; the values are only read on a CPU, where that does not
    synchronize.
    """
    return not on_host(mask) or bool(mask.any())


def _combine(rows: Tensor, places: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    each, total = places.view(-1, k), None
    if not rows.shape[0]:
        return rows.new_zeros((each.shape[0], rows.shape[1]))
    dropped = (each < 0).unsqueeze(2)
    masked = _may_have_true(dropped)
    for choice in range(k):
        part = rows.index_select(0, each[:, choice].clamp(min=0)).to(wide)
        if weights is not None:
            part = part * weights.view(-1, k)[:, choice, None].to(wide)
        if masked:
            part = part.masked_fill(dropped[:, choice], 0)
        total = part if total is None else total + part
    assert total is not None
    return total.to(rows.dtype)


def _dots(x: Tensor, rows: Tensor, places: Tensor, k: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    each, tokens = places.view(-1, k), x.to(wide)
    if not rows.shape[0]:
        return tokens.new_zeros(each.shape)
    parts = [(rows.index_select(0, each[:, j].clamp(min=0)).to(wide) * tokens).sum(1) for j in range(k)]
    return torch.stack(parts, 1).masked_fill(each < 0, 0)


def _row_operation(name: str, gpu: str, plain: Any) -> Operation[Tensor]:
    """Return an operation that a compiler sees as plain torch, which it fuses with its neighbours."""
    triton = Implementation("triton", f"{_GPU}:{gpu}", f"{_GPU}:reason", ops.no_kernels)
    return Operation(name, [triton, Implementation("reference", plain)], traced=plain)


#: Gather rows: (x [T, n], choice of each row, -1 for an empty one, k, weights [T k] or None, fill) -> [rows, n]. Empty
#: rows have `fill` in each element. The products with weights are computed in float32.
GATHER_ROWS = _row_operation("gather_rows", "gather", _gather)
#: Weighted sum of each token's k rows: (rows, places, k, weights [T k] or None) -> [T, n], as `unpermute`.
COMBINE_ROWS = _row_operation("combine_rows", "combine", _combine)
#: Dot products of x [T, n] and each token's k rows: (x, rows, places, k) -> float32 [T, k], 0 for a dropped choice.
DOT_ROWS = _row_operation("dot_rows", "dots", _dots)


class GatherRows(torch.autograd.Function):
    """Autograd function of `GATHER_ROWS`: (x, weights [T k] or None, sources, places, k) -> rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, sources: Tensor, places: Tensor, k: int) -> Tensor:
        # Only the gradient of the weights reads x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weights, sources, places)
        ctx.k = k
        return GATHER_ROWS(x, sources, k, weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weights, sources, places = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = CombineRows.apply(g, weights, sources, places, ctx.k)
        if ctx.needs_input_grad[1]:
            grad_weights = DotRows.apply(x, g, sources, places, ctx.k).reshape(-1).to(weights.dtype)
        return grad_x, grad_weights, None, None, None


class CombineRows(torch.autograd.Function):
    """Autograd function of `COMBINE_ROWS`: (rows, weights [T k] or None, sources, places, k) -> [T, n]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, sources: Tensor | None, places: Tensor, k: int
    ) -> Tensor:
        # Only the gradient of the weights reads the rows.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights, sources, places)
        ctx.k, ctx.count = k, rows.shape[0]
        return COMBINE_ROWS(rows, places, k, weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, weights, sources, places = ctx.saved_tensors
        sources = inverse(places, ctx.count) if sources is None else sources
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_rows = GatherRows.apply(g, weights, sources, places, ctx.k)
        if ctx.needs_input_grad[1]:
            grad_weights = DotRows.apply(g, rows, sources, places, ctx.k).reshape(-1).to(weights.dtype)
        return grad_rows, grad_weights, None, None, None


class DotRows(torch.autograd.Function):
    """Autograd function of `DOT_ROWS`: (x [T, n], rows, sources, places, k) -> [T, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, sources: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(x, rows, sources, places)
        ctx.k = k
        return DOT_ROWS(x, rows, places, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, rows, sources, places = ctx.saved_tensors
        weights, grad_x, grad_rows = g.reshape(-1), None, None
        if ctx.needs_input_grad[0]:
            grad_x = CombineRows.apply(rows, weights, sources, places, ctx.k)
        if ctx.needs_input_grad[1]:
            grad_rows = GatherRows.apply(x, weights, sources, places, ctx.k)
        return grad_x, grad_rows, None, None, None


def inverse(places: Tensor, count: int) -> Tensor:
    """Return the choice of each row, -1 for an empty row."""
    sources = torch.full((count + 1,), -1, dtype=torch.int64, device=places.device)
    numbers = torch.arange(places.shape[0], dtype=torch.int64, device=places.device)
    return sources.scatter(0, torch.where(places < 0, count, places), numbers)[:count]


def gather_quantized(q: Quantized, sources: Tensor, k: int) -> Quantized:
    """Gather codes and scales by the choice of each row; an empty row has the codes of zeros."""
    q = q.upright()
    data = GATHER_ROWS(q.data.view(torch.uint8), sources, k).view(q.data.dtype)
    scale = q.scale
    if q.spec.block[0] is not None:
        assert isinstance(scale, Tensor)
        # The scale of a block of zeros is 1 in float32, and 0 as a byte.
        scale = GATHER_ROWS(scale, sources, k, None, int(scale.is_floating_point()))
    return Quantized(data, scale, q.spec, (sources.shape[0], q.shape[1]), False, q.tensor_factor, q.amax)


# ---- input ops of the experts' GEMMs: gathered tokens, and activations ----
#
# Neither is saved for backward in high precision. Tokens are quantized before they are gathered if no block spans two
# rows: once for all k experts. They are saved once, and backward gathers the rows again.


def moves(spec: QuantSpec | None) -> bool:
    """Return True if quantizing tokens and then gathering them gives the same operand as quantizing each group's
    rows.
    """
    return spec is not None and by_rows(spec)


@dataclass(frozen=True)
class TokenRows:
    """Input op that gathers rows of x [T, K], from the choice of each row and the row of each choice."""

    #: Choices per token.
    k: int
    #: Compute the weight gradient from dequantized codes; False quantizes the tokens along the token axis.
    codes_alone: bool = False
    recomputes_input: bool = True

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        tokens, sources, places = x
        assert tokens is not None and sources is not None
        if not moves(spec):
            return GATHER_ROWS(tokens, sources, self.k), (tokens, None, sources, places)
        q = ops.QUANTIZE(tokens if tokens.stride(1) == 1 else tokens.contiguous(), spec)
        saved = (None, q) if self.codes_alone else (tokens, None)
        return gather_quantized(q, sources, self.k), (*saved, sources, places)

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        tokens, q, sources, _ = saved
        if tokens is not None:
            # Operands that wgrad reuses from fprop are quantized per group; others wgrad quantizes itself.
            return GATHER_ROWS(tokens, sources, self.k)
        return gather_quantized(q, sources, self.k)

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        tokens, _, sources, _ = saved
        return None if tokens is None else GATHER_ROWS(tokens, sources, self.k)

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        *_, places = saved
        return COMBINE_ROWS(g, places, self.k) if needs[0] else None, None, None


@dataclass(frozen=True)
class ActivationRows:
    """Input op that applies the activation to the first GEMM's output, with gate and value halves or alternating
    columns.
    """

    op: ActivationInputOp
    #: Columns alternate between gate and value, as in gpt-oss.
    interleaved: bool = False

    @property
    def recomputes_input(self) -> bool:
        return self.op.recomputes_input

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        parts: Any = self._parts(*x)
        # Scales per row or per 128 columns do not depend on groups; those of narrower blocks are swizzled per group.
        if spec is not None and moves(spec) and spec.block[1] in (None, 128) and may_fuse(parts[0].dtype, parts[0]):
            width = parts[0].shape[1] * len(parts) // get_activation(self.op.name).inputs
            fused = fused_quantize.operand(self.op, parts, width, spec, None, False, False, False)
            if fused is not None:
                return fused[1], fused[0].saved
        return self.op.forward(*parts)

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        return self.op.recompute_input(saved)[0]

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        y: Tensor = self.op.recompute_input(saved)[0]
        return y

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        gradients = self.op.backward(g, saved)
        return (torch.stack(gradients, -1).flatten(1) if self.interleaved else gradients[0],)

    def _parts(self, *x: Tensor | None) -> tuple[Tensor | None, ...]:
        (u,) = x
        assert u is not None
        return (u[:, ::2], u[:, 1::2]) if self.interleaved else (u,)
