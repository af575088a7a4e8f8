"""Rows of tokens laid expert by expert, and summed again: neither knows what an expert computes.

    permute      rows[places[t k + j]] = x[t]                          for each token t and each of its k choices j
    unpermute    y[t] = Σ_j weights[t, j] · rows[places[t k + j]]      added from j = 0 on, in float32

Each is the other's derivative. How many rows there are does not depend on who goes where, and nothing waits for a GPU:
a compiler sees one graph, and a CUDA graph repeats it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.recipes.text import instance
from quaver.reference.moe import check_permute, check_unpermute, rows_of, why_not_rows
from quaver.torch.nn.activation import ActivationInputOp
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import refuse_transforms
from quaver.torch.operations.functional import quantize
from quaver.torch.operations.ops import on_host

# ---- permutation -----------------------------------------------------------------------------------------

NO_TRANSFORMS = (
    "permute and unpermute do not run under torch.func transforms such as vmap and grad, and have no forward-mode "
    "derivative; loop over the batch and use torch.autograd, which differentiates them any number of times"
)


class Permuted(NamedTuple):
    """Tokens in the order of their experts."""

    #: [rows, H] as x, or `Quantized`: those of expert 0 first, of an expert in the order of tokens; zeros up to the
    #: next multiple of `pad`, and beyond the last expert's end.
    rows: Any
    #: int32 [experts]: where each expert's rows end, its padding included, as `grouped_matmul` takes them.
    offsets: Tensor
    #: int64 [T × k], in the order of tokens and of the choices of each: its row, -1 if it was dropped.
    places: Tensor


def permute(
    x: Tensor | Quantized, indices: Tensor, experts: int, *, pad: int = 1, capacity: int | None = None
) -> Permuted:
    """Copy each token's row to those of each expert that it chose.

    Args:
        x: [T, H], differentiable; or `Quantized` in blocks of a row or with one scale for all, whose codes and scales
            are copied as bytes: the same as quantizing what was permuted, at 1/k of the work and of the bytes read.
        indices: int64 [T, k], as `route` gives them. A number outside of [0, experts) is a choice of no expert here.
        experts: how many there are.
        pad: each expert's rows are filled with zeros up to a multiple of it.
        capacity: how many choices an expert takes, those of the first tokens; all others are dropped. None drops none.
    Returns:
        T k + min(T k, experts) (pad - 1) rows, rounded down to a multiple of pad; with a capacity no more than all
        experts take.
    Raises:
        ValueError: shapes that do not fit, a capacity or a pad of less than one, an operand whose scales are of
            several rows and not of all.
    Exact: rows, and the gradient of x, which adds up its copies' in float32 from the first choice on and rounds once.
    """
    if not isinstance(x, Quantized):
        instance("permute", "x", x, Tensor, "torch.randn(tokens, features)")
    instance("permute", "indices", indices, Tensor, "quaver.torch.route(logits, k).indices")
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
    offsets, places, sources = order(indices, experts, pad, capacity)
    if isinstance(x, Quantized):
        return Permuted(take_quantized(x, sources, indices.shape[1]), offsets, places)
    _refuse_transforms(x)
    rows: Tensor = GatherRows.apply(x, sources, places, indices.shape[1])
    return Permuted(rows, offsets, places)


def unpermute(rows: Tensor, places: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Sum what came of each token's k rows, each times its weight.

    Args:
        rows: [rows, H], differentiable.
        places: [T × k] of `permute`.
        k: choices of each token.
        weights: [T, k], differentiable; None is 1 for each. They multiply in float32.
    Returns:
        [T, H] in rows' dtype. A dropped choice adds nothing.
    Raises:
        ValueError: shapes that do not fit.
    Exact: the products and their sum from the first choice on are float32's (float64's of such), rounded once.
    """
    instance("unpermute", "rows", rows, Tensor, "those of permute")
    instance("unpermute", "places", places, Tensor, "those of permute")
    of_weights = None if weights is None else tuple(weights.shape)
    integers = places.dtype in (torch.int64, torch.int32)
    check_unpermute(tuple(rows.shape), tuple(places.shape), integers, k, of_weights)
    _refuse_transforms(rows, weights)
    y: Tensor = Combine.apply(rows, places, k, weights)
    return y


def _refuse_transforms(*tensors: Tensor | None) -> None:
    if not is_tracing():
        refuse_transforms(*tensors, sentence=NO_TRANSFORMS)


def order(indices: Tensor, experts: int, pad: int = 1, capacity: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows lie: offsets and places as `Permuted` has them, and the choice that each row is of, -1 for none.

    Exact: `quaver.reference.moe.places`.
    """
    flat = indices.reshape(-1).to(torch.int64)
    count, device = flat.shape[0], flat.device
    numbers = torch.arange(experts, dtype=torch.int64, device=device)
    ids, by_expert = torch.sort(flat, stable=True)
    begin = torch.searchsorted(ids, numbers)
    sizes = torch.searchsorted(ids, numbers, right=True) - begin
    if capacity is not None:
        sizes = sizes.clamp(max=capacity)
    ends = torch.cumsum((sizes + (pad - 1)) // pad * pad, 0)
    total = rows_of(count, experts, pad, capacity)
    # Where each expert's first row lies, less the number of choices before its own.
    shift = ends - (sizes + (pad - 1)) // pad * pad - begin
    ours = ids.clamp(0, experts - 1)
    within = torch.arange(count, dtype=torch.int64, device=device)
    row = within + shift[ours]
    there = ids == ours
    if capacity is not None:
        there = there & (within - begin[ours] < capacity)
    row = torch.where(there, row, -1)
    places = torch.empty_like(row).scatter(0, by_expert, row)
    # One row more, for those that have none.
    sources = torch.full((total + 1,), -1, dtype=torch.int64, device=device)
    sources = sources.scatter(0, torch.where(there, row, total), by_expert)[:total]
    return ends.to(torch.int32), places, sources


def take(x: Tensor, sources: Tensor, k: int) -> Tensor:
    """x [T, n] by the choice that each row is of; zeros for those of none."""
    if not x.shape[0]:
        return x.new_zeros((sources.shape[0], x.shape[1]))
    rows = x.index_select(0, sources.clamp(min=0) // k)
    none = sources < 0
    return rows.masked_fill_(none.unsqueeze(1), 0) if _may_be(none) else rows


def _may_be(mask: Tensor) -> bool:
    """Whether some of a mask may be set: looked at on a CPU, where that waits for nothing."""
    return not on_host(mask) or bool(mask.any())


def combined(rows: Tensor, places: Tensor, k: int, weights: Tensor | None) -> Tensor:
    """Sums of the k rows of each token."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    each, total = places.view(-1, k), None
    if not rows.shape[0]:
        return rows.new_zeros((each.shape[0], rows.shape[1]))
    dropped = (each < 0).unsqueeze(2)
    masked = _may_be(dropped)
    for choice in range(k):
        part = rows.index_select(0, each[:, choice].clamp(min=0)).to(wide)
        if weights is not None:
            part = part * weights[:, choice, None].to(wide)
        if masked:
            part = part.masked_fill(dropped[:, choice], 0)
        total = part if total is None else total + part
    assert total is not None
    return total.to(rows.dtype)


class GatherRows(torch.autograd.Function):
    """Rows of tokens; its derivative sums them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(sources, places)
        ctx.k = k
        return take(x, sources, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        _, places = ctx.saved_tensors
        return Combine.apply(g, places, ctx.k, None), None, None, None


class Combine(torch.autograd.Function):
    """Weighted sums of rows; its derivatives are rows of tokens, and products of two rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, k: int, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weights is not None else None, places, weights)
        ctx.k, ctx.count = k, rows.shape[0]
        return combined(rows, places, k, weights)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, places, weights = ctx.saved_tensors
        k, of_rows, of_weights = ctx.k, None, None
        if ctx.needs_input_grad[0]:
            sources = inverse(places, ctx.count)
            of_rows = GatherRows.apply(g, sources, places, k)
            if weights is not None:
                wide = torch.promote_types(g.dtype, torch.float32)
                factors = weights.to(wide).reshape(-1)[sources.clamp(min=0)].unsqueeze(1)
                of_rows = (of_rows.to(wide) * factors).to(g.dtype)
        if ctx.needs_input_grad[3]:
            of_weights = _products(g, rows, places, k).to(weights.dtype)
        return of_rows, None, None, of_weights


def inverse(places: Tensor, count: int) -> Tensor:
    """The choice that each of so many rows is of, -1 for none."""
    sources = torch.full((count + 1,), -1, dtype=torch.int64, device=places.device)
    numbers = torch.arange(places.shape[0], dtype=torch.int64, device=places.device)
    return sources.scatter(0, torch.where(places < 0, count, places), numbers)[:count]


def _products(g: Tensor, rows: Tensor, places: Tensor, k: int) -> Tensor:
    """[T, k]: each token's g times each of its rows, summed in float32; 0 for a dropped choice."""
    wide = torch.promote_types(g.dtype, torch.float32)
    each, along = places.view(-1, k), g.to(wide)
    if not rows.shape[0]:
        return along.new_zeros(each.shape)
    parts = [(rows.index_select(0, each[:, j].clamp(min=0)).to(wide) * along).sum(1) for j in range(k)]
    return torch.stack(parts, 1).masked_fill(each < 0, 0)


def take_quantized(q: Quantized, sources: Tensor, k: int) -> Quantized:
    """Codes and scales by the choice that each row is of; a row of none is what zeros are quantized to."""
    q = q.upright()
    token, none = sources.clamp(min=0) // k, (sources < 0).unsqueeze(1)
    zeros = quantize(torch.zeros((1, q.shape[1]), dtype=torch.float32, device=q.device), q.spec)

    def moved(of_rows: Tensor, of_zeros: Tensor) -> Tensor:
        if not of_rows.shape[0]:
            return of_zeros.expand(sources.shape[0], -1).contiguous()
        return torch.where(none, of_zeros, of_rows.index_select(0, token))

    data = moved(q.data.view(torch.uint8), zeros.data.view(torch.uint8)).view(q.data.dtype)
    scale = q.scale
    if q.spec.block[0] is not None:
        assert isinstance(scale, Tensor) and isinstance(zeros.scale, Tensor)
        scale = moved(scale, zeros.scale)
    return Quantized(data, scale, q.spec, (sources.shape[0], q.shape[1]), False, q.tensor_factor, q.amax)


# ---- rows ------------------------------------------------------------------------------------------------
# What experts multiply, made inside of their products: rows of tokens, and activations of their first products.
#
# Neither is kept for backward in high precision. Tokens are quantized before they are laid out, where no scale reaches
# over two rows: once for all k experts, and kept once, of which backward lays out the rows again.


def moves(spec: QuantSpec | None) -> bool:
    """Whether tokens quantized by a spec and then laid out are the rows, quantized group by group."""
    return spec is not None and spec.block[0] == 1 and spec.rounding == "nearest" and not spec.two_level


@dataclass(frozen=True)
class TokenRows:
    """Rows of x [T, K], by the choice of which each row is, and by the row of each choice."""

    #: Choices of each token.
    k: int
    #: The weight's gradient is of the values of the codes; else it quantizes the tokens along its own axis.
    codes_alone: bool = False
    recomputes_input: bool = True

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        tokens, sources, places = x
        assert tokens is not None and sources is not None
        if not moves(spec):
            return take(tokens, sources, self.k), (tokens, None, sources, places)
        q = ops.QUANTIZE(tokens if tokens.stride(1) == 1 else tokens.contiguous(), spec)
        kept = None if self.codes_alone else tokens
        return take_quantized(q, sources, self.k), (kept, q if kept is None else None, sources, places)

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        tokens, q, sources, _ = saved
        if tokens is not None:
            # What wgrad reuses of fprop is quantized by groups, and what it does not it quantizes itself.
            return take(tokens, sources, self.k)
        return take_quantized(q, sources, self.k)

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        tokens, _, sources, _ = saved
        return None if tokens is None else take(tokens, sources, self.k)

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        *_, places = saved
        return combined(g, places, self.k, None) if needs[0] else None, None, None


@dataclass(frozen=True)
class ActivationRows:
    """What an activation makes of the first products: one tensor, whose gate and value lie side by side or by turns."""

    prologue: ActivationInputOp
    #: Columns are gate, value, gate, value and so on, as gpt-oss has them.
    interleaved: bool = False

    @property
    def recomputes_input(self) -> bool:
        return self.prologue.recomputes_input

    def forward(self, *x: Tensor | None, spec: QuantSpec | None) -> tuple[Tensor | Quantized, Sequence[Any]]:
        return self.prologue.forward(*self._parts(*x))

    def recompute_input(self, saved: Sequence[Any], spec: QuantSpec | None) -> Tensor | Quantized:
        return self.prologue.recompute_input(saved)[0]

    def high(self, saved: Sequence[Any]) -> Tensor | None:
        raise AssertionError("activations are made in high precision")

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        gradients = self.prologue.backward(g, saved)
        return (torch.stack(gradients, -1).flatten(1) if self.interleaved else gradients[0],)

    def _parts(self, *x: Tensor | None) -> tuple[Tensor | None, ...]:
        (u,) = x
        assert u is not None
        return (u[:, ::2], u[:, 1::2]) if self.interleaved else (u,)
