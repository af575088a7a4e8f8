"""The scan of Mamba-2 chunk by chunk in plain torch: matrix products within a chunk, states between chunks.

With c_l the cumulative sum of A dt up to token l of a chunk, P the state that enters it, and xd = dt x:

    M[l, s] = (C_l · B_s) exp(c_l - c_s) for s ≤ l, else 0
    y_l = Σ_s M[l, s] xd_s + exp(c_l) P C_l + D x_l
    state that leaves = exp(c_last) P + Σ_s exp(c_last - c_s) xd_s ⊗ B_s

c is summed in float64. For float32 differences, c is split into two parts. The larger parts are multiples of `GRID`, so
their difference is exact: the difference between two nearby tokens keeps its precision however large the sums are.
Backward recomputes everything and saves only forward's arguments.
Source: Dao and Gu 2024, arXiv:2405.21060 §6.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- recurrence, token by token: the plain and slow definition of the scan ----
#
#     h_t = exp(A dt_t) h_(t-1) + dt_t x_t ⊗ B_t          h [P, N] for each head
#     y_t = h_t C_t + D x_t
#
# It runs in the dtype of its inputs and supports higher derivatives and torch.func transforms.
# Source: Dao and Gu 2024, arXiv:2405.21060.

#: Limits of the step that do not clamp.
UNLIMITED = (0.0, float("inf"))


def steps_of(
    dt: Tensor,
    bias: Tensor | None = None,
    softplus: bool = True,
    limit: tuple[float, float] = UNLIMITED,
) -> Tensor:
    """Return the steps softplus(dt + bias), clamped to the limit. NaN stays NaN.

    Args:
        dt: [..., H].
        bias: [H] or None.
        softplus: False leaves out the softplus.
        limit: (least, most).
    """
    dt = dt if bias is None else dt + bias
    dt = F.softplus(dt) if softplus else dt
    return dt if softplus and tuple(limit) == UNLIMITED else dt.clamp(*limit)


def step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one token: its output [batch, H, P], and the state after it.

    Args:
        state: [batch, H, P, N].
        x: [batch, H, P].
        dt: steps, [batch, H].
        A: [H].
        B, C: [batch, G, N].
        D: [H] or [H, P], or None.
    """
    batch, heads, dim, size = state.shape
    groups = B.shape[1]
    shared = (batch, groups, heads // groups)
    decay = (dt * A).exp()[..., None, None]
    added = (dt[..., None] * x).view(*shared, dim, 1) * B[:, :, None, None, :]
    state = state * decay + added.view(batch, heads, dim, size)
    y = (state.view(*shared, dim, size) @ C[:, :, None, :, None]).view(batch, heads, dim)
    return (y if D is None else y + skip(D) * x), state


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the scan token by token: outputs [batch, T, H, P], and the last state [batch, H, P, N].

    Args:
        x: [batch, T, H, P].
        dt: steps, [batch, T, H].
        A: [H].
        B, C: [batch, T, G, N]; each group serves H / G heads.
        D: [H] or [H, P], or None.
        initial: [batch, H, P, N]; None is zeros. NaN makes all later tokens of its head NaN, but no earlier one.
    """
    batch, tokens, heads, dim = x.shape
    state = x.new_zeros(batch, heads, dim, B.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(tokens):
        y, state = step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
        outputs.append(y)
    return (torch.stack(outputs, 1) if outputs else x.new_empty(x.shape)), state


def skip(D: Tensor) -> Tensor:
    """Return D [H] or [H, P] in a shape that broadcasts with x [..., H, P]."""
    return D[:, None] if D.dim() == 1 else D


# ---- chunks of concatenated sequences; no chunk has tokens of two sequences ----


class SequenceChunks(NamedTuple):
    """Assignment of the tokens of all sequences to chunks of `size` slots; a sequence's last chunk may have empty
    slots.
    """

    size: int
    #: Sequence of each chunk.
    sequences: list[int]
    #: Token of each slot, int64 [chunks * size]; None if tokens are already in slot order.
    tokens: Tensor | None
    #: bool [chunks, size], True for an empty slot; None if there is none.
    spare: Tensor | None

    def taken(self, x: Tensor, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Gather x [tokens, ...] for a range of chunks: [chunks, size, ...] in a dtype, 0 in empty slots."""
        a, b, lead = first * self.size, last * self.size, (last - first, self.size)
        if self.tokens is None:
            return x[a:b].to(dtype).view(*lead, *x.shape[1:])
        taken = x.index_select(0, self.tokens[a:b]).to(dtype).view(*lead, *x.shape[1:])
        if self.spare is None:
            return taken
        return taken.masked_fill_(self.spare[first:last].view(*lead, *(1,) * (x.dim() - 1)), 0)

    def put(self, out: Tensor, values: Tensor, first: int, last: int) -> None:
        """Scatter values [chunks, size, ...] to their tokens in out [tokens, ...]."""
        flat = values.reshape(-1, *values.shape[2:])
        if self.tokens is None:
            out[first * self.size : last * self.size].copy_(flat)
            return
        tokens = self.tokens[first * self.size : last * self.size]
        if self.spare is not None:
            there = (~self.spare[first:last]).flatten().nonzero().squeeze(1)
            tokens, flat = tokens[there], flat[there]
        out.index_copy_(0, tokens, flat.to(out.dtype))


def chunks_of(lengths: Sequence[int], size: int, device: torch.device) -> SequenceChunks:
    """Divide concatenated sequences of these lengths into chunks."""
    counts = [-(-length // size) for length in lengths]
    sequences = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
    if all(length % size == 0 for length in lengths):
        return SequenceChunks(size, sequences, None, None)
    starts = [0, *accumulate(lengths)]
    place = torch.arange(max(counts) * size, dtype=torch.int64, device=device)
    tokens = torch.cat([start + place[: count * size] for start, count in zip(starts, counts, strict=False)])
    spare = torch.cat([place[: n * size] >= length for n, length in zip(counts, lengths, strict=True)])
    return SequenceChunks(size, sequences, tokens.masked_fill_(spare, 0), spare.view(-1, size))


# ---- chunked scan ----

#: Bound of A dt by dtype: exp of larger exponents is 0 or infinite anyway. Clamping keeps the sums of a chunk finite,
#: so that no difference of infinities occurs.
BOUND = {torch.float32: 128.0, torch.float64: 1024.0}
#: Multiples of it up to 2^16 are exact in float32.
GRID = 2.0**-8
#: Maximum elements of a temporary tensor, so that a few of them fit a CPU's L2 cache.
ELEMENTS = 1 << 18


class ScanInputs(NamedTuple):
    """Arguments of a scan, with all sequences concatenated; the states are float32, or float64 like x."""

    #: x [T, H, P], dt [T, H] (the steps), A [H], B and C [T, G, N].
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    #: [H] or [H, P], or None.
    D: Tensor | None
    #: [sequences, H, P, N], or None.
    initial: Tensor | None

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the computation."""
        return torch.promote_types(self.x.dtype, torch.float32)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(groups, heads per group, features of a head, features of a state, heads)."""
        _, heads, dim = self.x.shape
        groups, state = self.B.shape[1:]
        return groups, heads // groups, dim, state, heads


class ScanChunks(NamedTuple):
    """Arguments for a range of chunks in the dtype of the computation: n chunks, G groups of r heads, L slots."""

    #: x [n, G, r, L, P], dt [n, G, r, L], B and C [n, G, L, N].
    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    #: Cumulative sums of A dt, float64 [n, G, r, L].
    sums: Tensor

    @property
    def entering(self) -> Tensor:
        """Decay of the entering state at each token."""
        return torch.exp(self.sums.to(self.x.dtype))

    @property
    def leaving(self) -> Tensor:
        """Decay of each token's contribution at the end of the chunk."""
        return (self.sums[..., -1:] - self.sums).to(self.x.dtype).exp_()

    def decays(self) -> Tensor:
        """Return exp(c_l - c_s) [n, G, r, L, L], 0 for s > l."""
        size, sums = self.x.shape[-2], self.sums
        if self.x.dtype is torch.float64:
            exponents = sums[..., :, None] - sums[..., None, :]
        else:
            high = (sums * (1 / GRID)).round_().mul_(GRID)
            low, high = (sums - high).float(), high.float()
            exponents = high[..., :, None] - high[..., None, :]
            exponents += low[..., :, None]
            exponents -= low[..., None, :]
        later = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu_(1)
        return exponents.masked_fill_(later, -math.inf).exp_()


def forward(inputs: ScanInputs, chunks: SequenceChunks, sequences: int) -> tuple[Tensor, Tensor]:
    """Return y [T, H, P] in x's dtype, and the state after each sequence [sequences, H, P, N], float32 or float64."""
    y, D = torch.empty_like(inputs.x, memory_format=torch.contiguous_format), _wide_skip(inputs)
    final = _initial(inputs, sequences)
    for first, last in _pieces(inputs, chunks):
        piece = _read(inputs, chunks, first, last)
        entering = _added(piece)
        _passed_on(chunks, first, entering, final, piece.sums)
        output = _multiplied(piece, piece.x * piece.dt[..., None], piece.decays())
        output.addcmul_(across(piece.C, entering), piece.entering[..., None])
        if D is not None:
            output.addcmul_(D, piece.x)
        chunks.put(y, _tokens_first(output), first, last)
    return y, final


def backward(
    g: Tensor, g_final: Tensor, inputs: ScanInputs, chunks: SequenceChunks, sequences: int
) -> list[Tensor | None]:
    """Return the gradients of x, dt, A, B, C, D and the initial states; the last two are None if absent."""
    groups, shared, dim, _, heads = inputs.sizes
    D, wide = _wide_skip(inputs), inputs.wide
    dx, ddt, dB, dC = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.x, inputs.dt, *inputs[3:5])
    )
    dA = inputs.x.new_zeros(groups, shared, 1, dtype=torch.float64)
    dD = None if inputs.D is None else inputs.x.new_zeros(groups, shared, 1, dim, dtype=wide)
    entered = _entered(inputs, chunks, sequences)
    # Gradient of the state that leaves a chunk, from the last chunk to the first.
    leaving = g_final.to(wide).clone()
    A = inputs.A.to(wide).view(groups, shared, 1)
    for first, last in reversed(list(_pieces(inputs, chunks))):
        piece = _read(inputs, chunks, first, last)
        gy = _heads_first(chunks.taken(g, first, last, wide), groups)
        into, out_of = piece.entering, piece.leaving
        gy_in = gy * into[..., None]
        passed = _passed_back(chunks, first, outer(gy_in, piece.C), leaving, piece.sums)
        parts = _ChunkGradients(piece, gy, gy_in, out_of, entered[first:last], passed)
        # dt of token j decays what earlier tokens contribute to later ones.
        da = parts.decayed_inside() + parts.decayed_across()
        dxd = parts.grad_xd()
        ddt_here = (dxd * piece.x).sum(-1).addcmul_(da, A)
        dA += (da * piece.dt).sum((0, 3), dtype=torch.float64)[..., None]
        grad_x = dxd.mul_(piece.dt[..., None])
        if D is not None and dD is not None:
            grad_x.addcmul_(gy, D)
            dD += (gy * piece.x).sum((0, 3))[:, :, None]
        chunks.put(dx, _tokens_first(grad_x), first, last)
        chunks.put(ddt, ddt_here.permute(0, 3, 1, 2).reshape(-1, chunks.size, heads), first, last)
        grad_B, grad_C = parts.grads_of_B_and_C()
        chunks.put(dB, grad_B.transpose(1, 2), first, last)
        chunks.put(dC, grad_C.transpose(1, 2), first, last)
    initial = None if inputs.initial is None else leaving.to(inputs.initial.dtype)
    if dD is not None and inputs.D is not None:
        dD = dD.view(heads, dim) if inputs.D.dim() == 2 else dD.view(heads, dim).sum(1)
        dD = dD.to(inputs.D.dtype)
    return [dx, ddt, dA.view(heads).to(inputs.A.dtype), dB, dC, dD, initial]


class _ChunkGradients:
    """Intermediate results of the gradients for a range of chunks.

    Args:
        piece: arguments of the chunks.
        gy: gradient of the output.
        gy_in: gy times the decay of the entering state.
        out_of: `ScanChunks.leaving`.
        entered: the states that enter, [n, G, r, P, N].
        passed: the gradients of the states that leave.
    """

    def __init__(
        self, piece: ScanChunks, gy: Tensor, gy_in: Tensor, out_of: Tensor, entered: Tensor, passed: Tensor
    ) -> None:
        self.piece, self.gy, self.gy_in, self.entered, self.passed = piece, gy, gy_in, entered, passed
        self.xd = piece.x * piece.dt[..., None]
        self.xd_out = self.xd * out_of[..., None]
        decays = piece.decays()
        #: Gradient of M times the decay, which is the gradient of C · B.
        self.grad_products = (gy @ self.xd.mT).mul_(decays)
        self.products = (piece.C @ piece.B.mT)[:, :, None]
        self.M = decays.mul_(self.products)
        #: Derivative of the leaving state with respect to each token's xd, applied to its gradient.
        self.from_leaving = across(piece.B, passed).mul(out_of[..., None])

    def grad_xd(self) -> Tensor:
        """Return the gradient of xd."""
        return torch.add(self.M.mT @ self.gy, self.from_leaving)

    def grads_of_B_and_C(self) -> tuple[Tensor, Tensor]:
        summed = self.grad_products.sum(2)
        grad_C = (summed @ self.piece.B).add_(back(self.gy_in, self.entered))
        return (summed.mT @ self.piece.C).add_(back(self.xd_out, self.passed)), grad_C

    def decayed_inside(self) -> Tensor:
        """Return the gradient of A dt through M: for each j the sum of M's entries with l ≥ j > s times their
        gradients.
        """
        between = (self.grad_products * self.products).tril_(-1)
        size = between.shape[-1]
        later = torch.ones(size, size, dtype=between.dtype, device=between.device).triu_()
        # [j, s]: sum over l ≥ j, for s < j. A difference of row and column sums would lose small terms.
        return (later @ between).tril_(-1).sum(-1)

    def decayed_across(self) -> Tensor:
        """Return the gradient of A dt through the entering and leaving states."""
        from_entered = (across(self.piece.C, self.entered).mul_(self.gy_in)).sum(-1)
        to_leaving = (self.from_leaving * self.xd).sum(-1)
        through = (self.entered * self.passed).sum((-1, -2)) * self.piece.entering[..., -1]
        after = from_entered.flip(-1).cumsum(-1).flip(-1)
        before = to_leaving.cumsum(-1) - to_leaving
        return after.add_(before).add_(through[..., None])


def _initial(inputs: ScanInputs, sequences: int) -> Tensor:
    """Return a copy of the initial states [sequences, H, P, N]."""
    _, _, dim, size, heads = inputs.sizes
    if inputs.initial is None:
        return inputs.x.new_zeros(sequences, heads, dim, size, dtype=inputs.wide)
    return inputs.initial.to(inputs.wide, copy=True, memory_format=torch.contiguous_format)


def _passed_on(chunks: SequenceChunks, first: int, added: Tensor, states: Tensor, sums: Tensor) -> None:
    """Replace each chunk's contribution to its leaving state by the state that enters it.

    Args:
        chunks: the chunks of all sequences.
        first: number of the first chunk in this range.
        added: the contributions [n, G, r, P, N], replaced in place.
        states: running state per sequence, [sequences, H, P, N]; updated in place to that after the last chunk.
        sums: cumulative sums of A dt.
    """
    decays = torch.exp(sums[..., -1].to(added.dtype))[..., None, None]
    for i in range(added.shape[0]):
        state = states[chunks.sequences[first + i]].view(added.shape[1:])
        leaves = torch.addcmul(added[i], state, decays[i])
        added[i] = state
        state.copy_(leaves)


def _entered(inputs: ScanInputs, chunks: SequenceChunks, sequences: int) -> Tensor:
    """Return the state that enters each chunk, [chunks, G, r, P, N]."""
    groups, shared, dim, size, _ = inputs.sizes
    states = _initial(inputs, sequences)
    entered = inputs.x.new_empty(len(chunks.sequences), groups, shared, dim, size, dtype=inputs.wide)
    for first, last in _pieces(inputs, chunks):
        piece = _read(inputs, chunks, first, last)
        _passed_on(chunks, first, _added(piece, entered[first:last]), states, piece.sums)
    return entered


def _passed_back(chunks: SequenceChunks, first: int, entering: Tensor, leaving: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of the state that leaves each chunk, from the last chunk to the first.

    Args:
        chunks: the chunks of all sequences.
        first: number of the first chunk in this range.
        entering: gradient of each entering state through the chunk's outputs.
        leaving: gradient of the running state per sequence, [sequences, H, P, N]; updated in place to that of the first
            state.
        sums: cumulative sums of A dt.
    """
    passed = torch.empty_like(entering)
    decays = torch.exp(sums[..., -1].to(entering.dtype))[..., None, None]
    for i in reversed(range(entering.shape[0])):
        state = leaving[chunks.sequences[first + i]].view(entering.shape[1:])
        passed[i] = state
        state.mul_(decays[i]).add_(entering[i])
    return passed


def _pieces(inputs: ScanInputs, chunks: SequenceChunks) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the ranges of chunks that are computed at a time."""
    _, _, dim, state, heads = inputs.sizes
    each = max(1, ELEMENTS // (heads * max(chunks.size**2, dim * state)))
    total = len(chunks.sequences)
    for first in range(0, total, each):
        yield first, min(first + each, total)


def _read(inputs: ScanInputs, chunks: SequenceChunks, first: int, last: int) -> ScanChunks:
    groups, wide = inputs.B.shape[1], inputs.wide
    x = _heads_first(chunks.taken(inputs.x, first, last, wide), groups)
    dt = chunks.taken(inputs.dt, first, last, wide).unflatten(2, (groups, -1)).permute(0, 2, 3, 1).contiguous()
    B, C = (chunks.taken(t, first, last, wide).transpose(1, 2).contiguous() for t in (inputs.B, inputs.C))
    exponents = dt * inputs.A.to(wide).view(groups, -1, 1)
    sums = exponents.clamp_(-BOUND[wide], BOUND[wide]).cumsum(-1, dtype=torch.float64)
    return ScanChunks(x, dt, B, C, sums)


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """Rearrange [n, L, H, P] to [n, G, r, L, P]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).contiguous()


def _tokens_first(x: Tensor) -> Tensor:
    """Rearrange [n, G, r, L, P] to [n, L, H, P]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _wide_skip(inputs: ScanInputs) -> Tensor | None:
    """Return D in a shape that broadcasts with [n, G, r, L, P]."""
    groups, shared, *_ = inputs.sizes
    return None if inputs.D is None else skip(inputs.D).to(inputs.wide).view(groups, shared, 1, -1)


def _added(piece: ScanChunks, out: Tensor | None = None) -> Tensor:
    """Return each chunk's contribution to its leaving state, [n, G, r, P, N]."""
    return outer(piece.x * (piece.dt * piece.leaving)[..., None], piece.B, out)


def _multiplied(piece: ScanChunks, xd: Tensor, decays: Tensor) -> Tensor:
    """Return M xd."""
    n, groups, shared, size, dim = xd.shape
    M = decays.mul_((piece.C @ piece.B.mT)[:, :, None])
    return torch.bmm(M.view(-1, size, size), xd.view(-1, size, dim)).view(n, groups, shared, size, dim)


# ---- batched products of [n, G, r, L, P] with [n, G, L, N] and [n, G, r, P, N], for all heads of a group at once ----


def outer(x: Tensor, B: Tensor, out: Tensor | None = None) -> Tensor:
    """Return Σ_l x_l ⊗ B_l per head, [n, G, r, P, N], written to `out` (contiguous) if passed."""
    n, groups, shared, size, dim = x.shape
    rows = x.mT.reshape(n * groups, shared * dim, size)
    place = None if out is None else out.view(n * groups, shared * dim, -1)
    product: Tensor = torch.bmm(rows, B.view(n * groups, size, -1), out=place)
    return product.view(n, groups, shared, dim, -1)


def across(C: Tensor, state: Tensor) -> Tensor:
    """Return each head's state times C_l, [n, G, r, L, P], as a view."""
    n, groups, shared, dim, width = state.shape
    rows = torch.bmm(C.view(n * groups, -1, width), state.reshape(n * groups, shared * dim, width).mT)
    return rows.view(n, groups, -1, shared, dim).transpose(2, 3)


def back(y: Tensor, state: Tensor) -> Tensor:
    """Return the sum over a group's heads of y_l times the state, [n, G, L, N]."""
    n, groups, shared, size, dim = y.shape
    rows = y.transpose(2, 3).reshape(n * groups, size, shared * dim)
    return torch.bmm(rows, state.reshape(n * groups, shared * dim, -1)).view(n, groups, size, -1)
