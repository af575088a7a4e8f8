"""Attention for CPUs with bf16 matrix instructions: all scores of 64 queries at once, skipping keys after a causal
tile.

torch's CPU kernel multiplies blocks of 32 queries, too small for efficient GEMMs, especially in backward. Here a tile
has the rows that a GEMM needs: the queries of all heads that share keys, for as many groups of heads as fit the cache.
Scores are float32. Backward saves only q, k, v and a logarithm per query and head, not even the output.

AMD EPYC (Zen 4), one thread, relative to torch's kernel, forward and backward, causal: 0.45 and 0.39 of its time for 4
sequences of 256 tokens, 8 query and 4 key heads of 64 features each; `docs/lab/attention.md` has other shapes.
Source: the backward from logarithms is FlashAttention's, Dao et al. 2022, arXiv:2205.14135, appendix B.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.torch.backends.cpu import gemm, quantize
from quaver.torch.nn.attention.inputs import AttentionCall
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.autograd import first_derivative, forward_level, transforms_active
from quaver.torch.operations.operation import Operation

#: Queries per tile, and scores computed together: two MiB.
QUERIES, SCORES = 64, 1 << 19
#: With fewer scores torch's kernel is used, which is a single call.
SMALLEST = 1 << 18
#: Largest head size, and its required multiple.
WIDEST, STEP = 256, 32
#: Longest sequence: libtorch keeps a kernel for each number of keys, a multiple of `QUERIES`.
LONGEST = 1024

_LOG2E = math.log2(math.e)
#: Value of `logarithms` that marks an output computed by torch; a real logarithm of a sum never has it.
_NONE = -math.inf
_aten: Any = torch.ops.aten
#: True if torch's kernel, which compiled code uses for unsupported lengths, can be called forward and backward.
_REACHED = hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu") and hasattr(
    _aten, "_scaled_dot_product_flash_attention_for_cpu_backward"
)


def reason(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why tiles cannot run this call, or ""."""
    others = call.window, call.bias, call.alibi_slopes, call.sinks, call.soft_cap, call.ragged, call.chunk
    if call.mask_type not in ("none", "causal") or call.dropout or any(option is not None for option in others):
        return "tiles are for the mask none or causal, without another option"
    return reason_unsupported(q, k, v, call.mask_type == "causal", call.scale)


def reason_unsupported(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> str:
    """Return why tiles do not support q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, D], or "".

    While tracing, the lengths are not checked, so that the compiler need not guard on them.
    """
    if q.dtype is not torch.bfloat16 or not q.is_cpu:
        return "tiles are for bfloat16 on a CPU"
    traced = is_tracing()
    # Checked first, because it rejects small layers.
    if not traced and not fits(q, k, causal):
        return f"tiles are for {QUERIES} to {LONGEST} tokens, {SMALLEST:,} scores or more, and one of torch's threads"
    if q.shape[-1] % STEP or q.shape[-1] > WIDEST or v.shape[-1] != q.shape[-1]:
        return (
            f"tiles are for heads of {STEP} to {WIDEST} features, a multiple of {STEP}, with the same size for q, k "
            "and v"
        )
    if not scale > 0:
        return "tiles are for a scale above 0"
    if not gemm.available():
        return "the processor has no instructions for bf16, or libtorch does not export the block that uses them"
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is not torch.bfloat16:
        return "torch.autocast asks for another dtype"
    if traced and not _REACHED:
        return "this version of torch lacks the kernel for other lengths"
    if traced and torch.compiler.is_exporting():
        return "an exported program may only contain torch's own operations"
    plain = traced or (_own(q) and _own(k) and _own(v))
    if plain and not transforms_active() and forward_level() < 0:
        return ""
    return "tiles are for plain tensors, outside of torch.func and forward mode"


def fits(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Return True if the lengths are within the supported range; compiled code checks this at run time."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    if not QUERIES <= queries <= LONGEST or not QUERIES <= keys <= LONGEST or (causal and queries != keys):
        return False
    return batch * heads * queries * keys >= SMALLEST and torch.get_num_threads() == 1


def _own(x: Tensor) -> bool:
    return type(x) is Tensor or type(x) is nn.Parameter


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return attention [B, H, Sq, D] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, D]."""
    return attended(q, k, v, call.mask_type == "causal", call.scale)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Return attention as `attend` does, with its two supported options as arguments."""
    y: Tensor = _TiledAttentionFunction.apply(q, k, v, causal, float(scale))
    return y


NO_DOUBLE_BACKWARD = (
    "attention of bfloat16 on a CPU has no second derivative, as in torch; compute the part that is "
    "differentiated twice in float32 with quaver.torch.only('reference')"
)


class _TiledAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        out, logarithms = FORWARD.operator(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, logarithms)
        ctx.constants = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_derivative(_gradients, ctx, NO_DOUBLE_BACKWARD, grad)


def _gradients(ctx: Any, saved: Any, grad: Tensor) -> tuple[Any, ...]:
    return *BACKWARD.operator(grad, *saved, *ctx.constants), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, queries, width), (groups, keys) = q.shape, k.shape[1:3]
    logarithms = torch.empty(_logarithms(q), dtype=torch.float32, device="cpu")
    if not fits(q, k, causal):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != groups)
        # A marker, so that backward need not check again: the number of threads may have changed by then.
        return _like(y).copy_(y), logarithms.fill_(_NONE)
    rows, of_keys, of_values = _rows(q, groups), _along(_matrices(k)), _down(_matrices(v))
    out, of_rows = torch.empty_like(rows), logarithms.view(*rows.shape[:3], 1)
    for tile, part, n in _parts(rows, keys, causal):
        scores = _scores("scores", rows[tile, part], of_keys[part], n)
        _hide(scores, keys, causal)
        # The product is rounded before the difference, here and in backward, so the largest score gives exactly 1.
        top = scores.mul_(scale * _LOG2E).amax(-1, True)
        total = scores.sub_(top).exp2_().sum(-1, True)
        torch.add(total.log2(), top, out=of_rows[tile, part])
        # Divide after the GEMM, so that the largest share of a row is 1, which bf16 represents exactly.
        shares = quantize.buffer("shares", scores.shape, torch.bfloat16).copy_(scores)
        sums = quantize.buffer("sums", (*shares.shape[:2], width), torch.float32)
        gemm.multiply_each(shares, of_values[part], sums)
        out[tile, part] = sums.div_(total)
    return _tokens(out, batch, groups, queries), logarithms


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, logarithms: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, _, queries, _), (groups, keys) = q.shape, k.shape[1:3]
    if not (q.numel() and k.numel()):
        return _like(q).zero_(), _like(k).zero_(), _like(v).zero_()
    if logarithms[0] == _NONE:
        q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad))
        y, own = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        of = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, y, own, 0.0, causal, scale=scale)
        gradients: Any = tuple(_like(g).copy_(g) for g in of)
        return gradients
    rows, of_rows, matrices = _rows(q, groups), _rows(grad, groups), _matrices(k)
    of_keys, of_values = _along(matrices), _along(_matrices(v))
    out, exact = torch.empty_like(rows), math.frexp(scale)[0] == 0.5
    logarithms = logarithms.view(*rows.shape[:3], 1)
    of_k, of_v = torch.zeros((2, *matrices.shape), dtype=torch.float32, device="cpu")
    for tile, part, n in _parts(rows, keys, causal):
        scores = _scores("scores", rows[tile, part], of_keys[part], n)
        _hide(scores, keys, causal)
        scores.mul_(scale * _LOG2E).sub_(logarithms[tile, part]).exp2_()
        shares = quantize.buffer("shares", scores.shape, torch.bfloat16).copy_(scores)
        of_v[part, :n] += torch.bmm(shares.mT, of_rows[tile, part])
        # Gradient of the scores: P (dP - sum of P dP along the row).
        change = _scores("change", of_rows[tile, part], of_values[part], n)
        _hide(change, keys, causal, False)
        change.mul_(scores)
        change.addcmul_(scores, change.sum(-1, True), value=-1)
        if not exact:
            change.mul_(scale)
        shares.copy_(change)
        torch.bmm(shares, matrices[part, :n], out=out[tile, part])
        of_k[part, :n] += torch.bmm(shares.mT, rows[tile, part])
    if exact:
        out.mul_(scale)
        of_k.mul_(scale)
    of_keys, of_values = (_like(k).copy_(x.view(batch, groups, -1, x.shape[-1])[:, :, :keys]) for x in (of_k, of_v))
    return _tokens(out, batch, groups, queries), of_keys, of_values


def _parts(rows: Tensor, keys: int, causal: bool) -> Iterator[tuple[int, slice, int]]:
    """Yield (tile number, groups of heads computed together, number of keys that the tile sees)."""
    tiles, groups, height, _ = rows.shape
    for tile in range(tiles):
        n = (tile + 1 if causal else _tiles(keys)) * QUERIES
        step = max(1, SCORES // (height * n))
        for first in range(0, groups, step):
            yield tile, slice(first, first + step), n


def _scores(slot: str, rows: Tensor, pairs: Tensor, n: int) -> Tensor:
    """Multiply rows [N, m, D] by n columns of matrices, float32 [N, m, n], into a reused buffer named `slot`."""
    out = quantize.buffer(slot, (*rows.shape[:2], n), torch.float32)
    gemm.multiply_each(rows, pairs, out)
    return out


def _hide(scores: Tensor, keys: int, causal: bool, lowest: bool = True) -> None:
    """Set the scores of hidden keys to -inf (lowest=True) or 0, whatever their value."""
    n = scores.shape[2]
    if causal:
        # In the last tile of columns each query sees the keys up to its own; padding columns come after all of them.
        own = scores.view(torch.int32).view(scores.shape[0], -1, QUERIES, n)[..., n - QUERIES :]
        seen, infinity = _triangle()
        own.bitwise_and_(seen)
        if lowest:
            own.bitwise_or_(infinity)
    elif keys < n:
        scores[..., keys:] = -torch.inf if lowest else 0.0


@cache
def _triangle() -> tuple[Tensor, Tensor]:
    """Return int32 masks of the diagonal tile: all bits set where visible, and the bits of -inf where hidden."""
    with torch.inference_mode(False):
        seen = torch.ones(QUERIES, QUERIES, dtype=torch.bool, device="cpu").tril_()
        bits = torch.tensor(-torch.inf, dtype=torch.float32, device="cpu").view(torch.int32)
        return torch.where(seen, -1, 0).to(torch.int32), torch.where(seen, 0, bits)


# ---- operand layouts: rows [tiles, B × G, H / G × 64, D], matrices [B × G, S, D], zero-padded to whole tiles ----


def _tiles(tokens: int) -> int:
    return -(-tokens // QUERIES)


def _logarithms(q: Tensor) -> int:
    """Return the number of q's rows with padding. A single size, so that a compiler does not guard on several being
    1.
    """
    return q.shape[0] * q.shape[1] * _tiles(q.shape[2]) * QUERIES


def _rows(x: Tensor, groups: int) -> Tensor:
    """Rearrange queries [B, H, S, D] into tiles of rows, with the heads that share keys together."""
    batch, heads, tokens, width = x.shape
    tiles, whole = _tiles(tokens), tokens // QUERIES
    out = torch.empty((tiles, batch, groups, heads // groups, QUERIES, width), dtype=x.dtype, device="cpu")
    x = x.unflatten(1, (groups, -1))
    if whole < tiles:
        out[whole].zero_()
        out[whole, ..., : tokens - whole * QUERIES, :] = x[..., whole * QUERIES :, :]
    if whole:
        out[:whole] = x[..., : whole * QUERIES, :].unflatten(3, (whole, QUERIES)).permute(3, 0, 1, 2, 4, 5)
    return out.view(tiles, batch * groups, -1, width)


def _tokens(rows: Tensor, batch: int, groups: int, tokens: int) -> Tensor:
    """Undo `_rows`: return [B, H, S, D] stored as [B, S, H, D]."""
    tiles, _, height, width = rows.shape
    rows = rows.view(tiles, batch, groups, height // QUERIES, QUERIES, width).permute(1, 2, 3, 0, 4, 5)
    out = _empty(rows, batch, groups * (height // QUERIES), tokens, width)
    heads, whole = out.unflatten(1, (groups, -1)), tokens // QUERIES
    if whole:
        heads[..., : whole * QUERIES, :].unflatten(3, (whole, QUERIES)).copy_(rows[:, :, :, :whole])
    if whole < tiles:
        heads[..., whole * QUERIES :, :] = rows[:, :, :, whole, : tokens - whole * QUERIES]
    return out


def _matrices(x: Tensor) -> Tensor:
    """Return keys or values [B, G, S, D] as contiguous padded matrices, aligned so that feature pairs can be read as
    int32.
    """
    rest = -x.shape[2] % QUERIES
    x = F.pad(x, (0, 0, 0, rest)) if rest else x.contiguous()
    return (x if x.storage_offset() % 2 == 0 else x.clone()).view(-1, *x.shape[2:])


def _along(matrices: Tensor) -> Tensor:
    """Rearrange matrices for GEMMs that contract over features: [N, D / 2, S, 2]."""
    return matrices.view(torch.int32).mT.contiguous().view(torch.bfloat16).unflatten(2, (-1, 2))


def _down(matrices: Tensor) -> Tensor:
    """Rearrange matrices for GEMMs that contract over keys: [N, S / 2, D, 2]."""
    return matrices.unflatten(1, (-1, 2)).mT.contiguous()


def _empty(like: Tensor, batch: int, heads: int, tokens: int, width: int) -> Tensor:
    """Return an uninitialized [B, H, S, D] stored as [B, S, H, D]; not a view, because autograd rejects writes to
    views.
    """
    strides = tokens * heads * width, width, heads * width, 1
    return like.new_empty_strided((batch, heads, tokens, width), strides)


def _like(x: Tensor) -> Tensor:
    """Return an uninitialized tensor of x's shape [B, H, S, D], stored as [B, S, H, D]."""
    return _empty(x, *x.shape)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(_logarithms(q), dtype=torch.float32)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _flops(q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of q kᵀ and P v for all pairs, as torch counts attention on a GPU."""
    return 4 * q.numel() * k.shape[2]


def _flops_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of q kᵀ again, and of two GEMMs each for the gradients of scores and of values."""
    return 10 * q.numel() * k.shape[2]


FORWARD: Operation[tuple[Tensor, Tensor]] = Operation(
    "attention_tiles(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
    _forward,
    fake=_fake_forward,
    flops=_flops,
)
BACKWARD: Operation[tuple[Tensor, Tensor, Tensor]] = Operation(
    "attention_tiles_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor logarithms, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_fake_backward,
    flops=_flops_backward,
)
