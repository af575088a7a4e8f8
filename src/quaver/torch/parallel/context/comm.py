"""Context parallelism without autograd: chunk order, visible keys, communication, and blockwise softmax."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quaver import recipes
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.nn.attention.inputs import alibi
from quaver.torch.numerics.quantized import Quantized, storage
from quaver.torch.operations import ops
from quaver.torch.operations.functional import quantize
from quaver.torch.parallel.comm import exchange
from quaver.torch.parallel.comm_counter import Kind, count_async, count_collective

# ---- chunks and masks ----
# Positions of a sequence's chunks and the keys that queries see; nothing here communicates.
#
# A causal query sees only earlier keys, so the last part of a sequence has more work than the first. In the balanced
# order the sequence is split into twice as many chunks as ranks, and rank r holds chunks r and 2 ranks - 1 - r. Each
# rank then has the same number of visible query-key pairs.
#
# Source: Brandon et al. 2023, arXiv:2311.09431 (striped); the order by halves is Megatron's and Llama 3's
# (arXiv:2407.21783 §3.3.2).


class ChunkOrder(NamedTuple):
    """Assignment of a sequence's chunks to ranks."""

    ranks: int
    balanced: bool = True

    @property
    def chunks(self) -> int:
        """Number of chunks of equal length."""
        return 2 * self.ranks if self.balanced else self.ranks

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank, in the order in which it holds them."""
        return (rank, self.chunks - 1 - rank) if self.balanced else (rank,)

    def spans(self, rank: int, tokens: int) -> list[tuple[int, int]]:
        """Return the first and one past the last token of each chunk of a rank, for a sequence of `tokens` tokens."""
        length = tokens // self.chunks
        return [(chunk * length, (chunk + 1) * length) for chunk in self.of(rank)]

    def cut(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Select a rank's chunks from a whole sequence.

        Raises:
            ValueError: the sequence length is no multiple of the number of chunks.
        """
        tokens = x.shape[dim]
        if tokens % self.chunks:
            padded = -(-tokens // self.chunks) * self.chunks
            other = f", or take balanced=False for multiples of {self.ranks}" if self.balanced else ""
            raise ValueError(
                f"a sequence of {tokens} tokens (dimension {dim} of {list(x.shape)}) does not divide into "
                f"{self.chunks} chunks for {self.ranks} ranks; pad it to {padded}{other}"
            )
        return torch.cat([x.narrow(dim, a, b - a) for a, b in self.spans(rank, tokens)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Undo `cut`: assemble the whole sequence from the shards of all ranks, in rank order."""
        length = parts[0].shape[dim] // len(self.of(0))
        chunks: list[Tensor | None] = [None] * self.chunks
        for rank, part in enumerate(parts):
            for chunk, piece in zip(self.of(rank), part.split(length, dim) if length else (part, part), strict=False):
                chunks[chunk] = piece
        return torch.cat([piece for piece in chunks if piece is not None], dim)

    def places(self, tokens: int, rank: int, device: torch.device | None = None) -> Tensor:
        """Return int64 positions of a rank's tokens in a sequence of `tokens` tokens."""
        return self.cut(torch.arange(tokens, dtype=torch.int64, device=device), 0, rank)


class CausalWindow(NamedTuple):
    """Which keys a query sees, by positions in the whole sequence or in packed sequences (`cu_seqlens`)."""

    #: Number of visible keys before and after the query, -1 for all; (-1, 0) is causal.
    left: int = -1
    right: int = -1
    #: Chunked attention: a query sees only keys of its own run of this length; None for no limit.
    chunk: int | None = None
    #: ALiBi slopes, float32 [H] or [B, H], or None.
    slopes: Tensor | None = None
    #: Boundaries of packed sequences (`cu_seqlens`), or None.
    ends: tuple[int, ...] | None = None

    @property
    def by_position(self) -> bool:
        """True if anything besides sequence boundaries masks or biases scores."""
        return self.left >= 0 or self.right >= 0 or self.chunk is not None or self.slopes is not None

    def keys_of(self, begin: int, end: int, tokens: int) -> tuple[int, int]:
        """Return the first key, and one past the last, that queries from `begin` to `end` may see, of `tokens` keys.

        With `chunk`, the first key begins a run, or a sequence if several are packed.
        """
        first = 0 if self.left < 0 or self.chunk is not None else max(begin - self.left, 0)
        last = tokens if self.right < 0 else min(end + self.right, tokens)
        if self.ends is not None and len(self.ends) > 1:
            first = max(first, self.ends[bisect_right(self.ends, begin) - 1])
            last = min(last, self.ends[bisect_right(self.ends, end - 1)])
        elif self.chunk is not None:
            first = begin // self.chunk * self.chunk
            last = min(last, -(-end // self.chunk) * self.chunk)
        return min(first, last), last

    def hides_some(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Return False if every query of a span sees every key of another span."""
        if self.ends is not None or self.chunk is not None:
            return True
        (a, b), (c, d) = queries, keys
        return (self.right >= 0 and d - 1 - a > self.right) or (self.left >= 0 and b - 1 - c > self.left)

    def hidden(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """Return bool [1, 1, queries, keys], True where a query does not see a key; None if all are visible."""
        if not self.hides_some(queries, keys):
            return None
        query_positions, key_positions = (
            torch.arange(a, b, dtype=torch.int64, device=device) for a, b in (queries, keys)
        )
        query_positions = query_positions[:, None]
        hidden = torch.zeros((), dtype=torch.bool, device=device)
        if self.ends is not None:
            starts = torch.tensor(self.ends, dtype=torch.int64, device=device)
            sequence_of_queries, sequence_of_keys = (
                torch.bucketize(x, starts[1:], right=True) for x in (query_positions, key_positions)
            )
            hidden = hidden | (sequence_of_queries != sequence_of_keys)
            last = starts.shape[0] - 1
            query_positions, key_positions = (
                x - starts[s.clamp(max=last)]
                for x, s in ((query_positions, sequence_of_queries), (key_positions, sequence_of_keys))
            )
        ahead = key_positions - query_positions
        if self.right >= 0:
            hidden = hidden | (ahead > self.right)
        if self.left >= 0:
            hidden = hidden | (ahead < -self.left)
        if self.chunk is not None:
            hidden = hidden | (key_positions // self.chunk != query_positions // self.chunk)
        return hidden[None, None] if hidden.dim() else None

    def bias(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor | None:
        """Return the ALiBi bias, float32 [B or 1, H, queries, keys]; None without slopes."""
        if self.slopes is None:
            return None
        query_positions, key_positions = (
            torch.arange(a, b, dtype=torch.int64, device=device) for a, b in (queries, keys)
        )
        return alibi(self.slopes, (key_positions - query_positions[:, None])[None, None])


# ---- communication ----

Group = dist.ProcessGroup


class SequenceGroup(NamedTuple):
    """The ranks that share a sequence, and how they exchange keys and values."""

    group: Group
    order: ChunkOrder
    #: Axis of tokens.
    dim: int
    #: Spec in which keys and values are sent; None sends them unquantized.
    spec: QuantSpec | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def all_to_all_parts(parts: Tensor, group: Group, kind: Kind = "keys_values") -> Tensor:
    """All-to-all of equal parts [ranks, ...]: part i goes to rank i, and part i of the result comes from rank i."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with count_collective(kind, "exchange", parts, group):
        dist.all_to_all_single(received, parts, group=group)
    return received


def send_to_next(tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
    """Start to send tensors to the next rank. Returns a function that waits for those of the previous rank."""
    fresh = [torch.empty_like(x) for x in tensors]
    works = exchange(1, tensors, fresh, group)
    # The first wait waits for all operations.
    full = [x for x in tensors if x.numel()]
    waits = [count_async("keys_values", "send", x, group, [] if i else works) for i, x in enumerate(full)]

    def finish() -> list[Tensor]:
        for wait in waits:
            wait()
        return fresh

    return finish


# ---- quantized keys and values ----
# Keys and values as they are sent: unquantized, or as codes and scales, quantized once by their rank.


def spec_of(recipe: str | Recipe | None) -> QuantSpec | None:
    """Return the spec in which keys and values are sent: that of the recipe's input; None sends them unquantized.

    Raises:
        ValueError: the recipe does not quantize inputs to 8 bits with scales that a shard can compute alone.
    """
    if recipe is None:
        return None
    recipe = recipes.get(recipe)
    spec = recipe.fprop.a
    reason = ""
    if spec is None:
        reason = "quantizes no input"
    elif recipe.delayed is not None:
        reason = "scales by the amaxes of earlier steps, which keys and values do not have"
    elif spec.format.packed or spec.two_level or spec.hadamard:
        reason = "is not of eight bits"
    elif spec.block[0] not in (1, None) or (spec.block[0] is None and not spec.per_tensor):
        reason = "shares scales between tokens"
    if spec is None or reason:
        raise ValueError(
            f"keys and values cannot be sent in recipe {recipe}, which {reason}: give quantized='mxfp8', "
            "'rowwise', 'blockwise' or 'tensorwise', or None"
        )
    return replace(spec, rounding="nearest")


def pack(x: Tensor, spec: QuantSpec | None) -> list[Tensor]:
    """Quantize x [parts, ..., D] for sending: returns [x], or [codes as bytes, scales].

    A per-tensor scale covers all parts. Exact: the bits of `quaver.torch.quantize`.
    """
    x = x.contiguous()
    if spec is None:
        return [x]
    q = quantize(x.view(-1, x.shape[-1]), spec).plain()
    assert not q.transposed
    scale = (
        q.scale if isinstance(q.scale, Tensor) else torch.full((1, 1), q.scale, dtype=torch.float32, device=x.device)
    )
    scale = scale.expand(x.shape[0], 1) if spec.per_tensor else scale.reshape(x.shape[0], -1)
    return [q.data.view(torch.uint8).view(x.shape), scale.contiguous()]


def unpack(payload: list[Tensor], spec: QuantSpec | None, dtype: torch.dtype) -> Tensor:
    """Dequantize one part of `pack`'s result, without the leading axis."""
    if spec is None:
        return payload[0]
    codes, scale = payload
    shape = (codes.shape[:-1].numel(), codes.shape[-1])
    data = codes.reshape(shape).view(storage(spec.format))
    scale = scale.view(1, 1) if spec.per_tensor else scale.view(shape[0], -1)
    return ops.DEQUANTIZE(Quantized(data, scale, spec, shape), dtype).view(codes.shape)


# ---- blockwise softmax ----
# Attention of some queries to some of the keys they see; partial results are merged in float32.
#
#     S = cap(q kᵀ scale) + bias        m = max S        l = sum exp(S - m)        o = exp(S - m) v
#     merged: m = max(m₁, m₂)        l = exp(m₁ - m) l₁ + exp(m₂ - m) l₂        o likewise; at last o / l
#
# The maximum and the sum are stored separately: their joint logarithm in float32 would lose precision as scores grow.
# Plain torch operations, which materialize the scores of a block. Source: Milakov and Gimelshein 2018,
# arXiv:1805.02867;
# Dao et al. 2022, arXiv:2205.14135; around a ring, Liu et al. 2023, arXiv:2310.01889.


class ScoreBlock(NamedTuple):
    """Scale, soft cap, mask and bias of a block of scores."""

    scale: float
    soft_cap: float | None
    #: True where masked, broadcastable to [B, H, Sq, Sk]; None for no mask.
    hidden: Tensor | None
    #: Bias, broadcastable to [B, H, Sq, Sk], or None.
    bias: Tensor | None


class MergedSoftmax(NamedTuple):
    """Unnormalized softmax results of queries over the keys merged so far."""

    #: Weighted sum of values, o [B, H, Sq, Dv].
    out: Tensor
    #: Largest score, m [B, H, Sq]; -inf if no key is visible.
    top: Tensor
    #: Sum of exponentials, l [B, H, Sq].
    total: Tensor

    def rows(self, part: slice) -> "MergedSoftmax":
        """Return a view of some queries."""
        return MergedSoftmax(self.out[:, :, part], self.top[:, :, part], self.total[:, :, part])

    def add(self, other: "MergedSoftmax") -> None:
        """Merge the result of other keys for the same queries, in place."""
        top = torch.maximum(self.top, other.top)
        for old, new in zip((self.total, self.out), (other.total, other.out), strict=True):
            shape = (*top.shape, 1)[: old.dim()]
            old_factor, added = ((x - _finite(top)).exp().view(shape) for x in (self.top, other.top))
            old.mul_(old_factor).add_(new * added)
        self.top.copy_(top)

    def normalized(self) -> Tensor:
        """Return o / l, or 0 if no key is visible."""
        return self.out / torch.where(self.total == 0, 1.0, self.total).unsqueeze(-1)


def forward(q: Tensor, k: Tensor, v: Tensor, block: ScoreBlock) -> MergedSoftmax:
    """Compute the softmax of one block: q [B, H, Sq, D], k [B, G, Sk, D], v [B, G, Sk, Dv]; each kv head serves H / G
    of q.
    """
    scores, _ = _scores(q, k, block)
    top = scores.amax(-1)
    p = (scores - _finite(top).unsqueeze(-1)).exp_()
    return MergedSoftmax(_grouped_product(p, v), top, p.sum(-1))


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: MergedSoftmax, block: ScoreBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's contributions to the gradients of q, k and v.

    Args:
        grad: gradient of the output, [B, H, Sq, Dv].
        q, k, v: as in `forward`.
        merged: merged over all keys of the queries, sinks included; its `out` must hold rowsum(grad ∘ output) [B, H,
            Sq, 1].
        block: as in `forward`.
    """
    scores, slope = _scores(q, k, block)
    p = (scores - _finite(merged.top).unsqueeze(-1)).exp_()
    p /= torch.where(merged.total == 0, 1.0, merged.total).unsqueeze(-1)
    ds = (_grouped_product(grad, v.mT) - merged.out).mul_(p)
    if block.hidden is not None:
        # Remove NaN from 0 times a NaN or infinity of a masked key.
        ds = ds.masked_fill(block.hidden, 0)
    if slope is not None:
        ds = ds * slope
    groups = k.shape[1]
    dq = _grouped_product(ds, k).mul_(block.scale)
    dk = _summed(ds, q, groups).mul_(block.scale)
    return dq, dk, _summed(p, grad, groups)


def _scores(q: Tensor, k: Tensor, block: ScoreBlock) -> tuple[Tensor, Tensor | None]:
    """Return the scores [B, H, Sq, Sk], -inf where masked, and the derivative of the soft cap or None."""
    scores, slope = _grouped_product(q, k.mT).mul_(block.scale), None
    if block.soft_cap is not None:
        soft_capped = torch.tanh(scores / block.soft_cap)
        scores, slope = soft_capped * block.soft_cap, 1 - soft_capped * soft_capped
    if block.bias is not None:
        scores = scores + block.bias
    if block.hidden is not None:
        scores = scores.masked_fill(block.hidden, -torch.inf)
    return scores, slope


def _finite(top: Tensor) -> Tensor:
    """Replace -inf by 0, because -inf minus -inf would be NaN."""
    return torch.where(top == -torch.inf, 0.0, top)


def _grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Compute x [B, H, n, k] @ y [B, G, k, m] for grouped heads: each head of x uses its group's y."""
    groups = y.shape[1]
    return (x.unflatten(1, (groups, -1)) @ y.unsqueeze(2)).flatten(1, 2)


def _summed(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """Compute x.T [B, H, m, n] @ y [B, H, n, k] and sum over the heads of each group: [B, G, m, k]."""
    return (x.mT @ y).unflatten(1, (groups, -1)).sum(2)
