"""Implementations of attention: flash-attn, FlexAttention, torch's SDPA and the plain reference; and quantized
heads.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.recipes.spec import QuantSpec
from quaver.reference.attention import MASKS
from quaver.torch.nn.attention.inputs import AttentionCall, both, bounds, positions_of_keys, scores_shape, simplify
from quaver.torch.numerics.quantized import decode_scales, storage
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops

# ---- flash-attn: causal, windows, ALiBi, soft cap, ragged batches, but no tensor masks; always aligned bottom right
# ----

#: True if flash-attn can be imported.
INSTALLED = find_spec("flash_attn") is not None


def reason(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why flash-attn cannot run this call here, or ""."""
    if not INSTALLED:
        return "flash-attn is not installed"
    if not q.is_cuda:
        return f"flash-attn runs on GPUs, and this is {q.device.type!r}"
    return unsupported(q, k, v, call)


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why flash-attn does not support this call on any machine, or ""."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 and bfloat16, not {q.dtype}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] > 256:
        return (
            f"flash-attn requires the same head size for q, k and v, at most 256; these are {q.shape[-1]} and "
            f"{v.shape[-1]}"
        )
    others = ("bias", call.bias), ("sinks", call.sinks), ("chunks", call.chunk)
    for name, value in (("mask of tokens or pairs", call.mask), *others):
        if value is not None:
            return f"flash-attn has no {name}"
    if call.soft_cap is not None and call.dropout:
        return "flash-attn has no soft cap with dropout"
    if call.alibi_slopes is not None and call.alibi_slopes.requires_grad:
        return "flash-attn has no gradient of ALiBi's slopes"
    if not q.shape[2] or not k.shape[2]:
        return "there is no query or no key"
    if _aligns(call) and not _equally_long(q, k, call):
        return f"flash-attn aligns bottom right, and {call.mask_type!r} of unequal lengths aligns top left"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return attention [B, H, Sq, D] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, D]."""
    import flash_attn  # type: ignore[import-not-found]

    options: dict[str, Any] = {
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": MASKS[call.mask_type][1],
        "window_size": call.window or (-1, -1),
        "softcap": call.soft_cap or 0.0,
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.float(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))
    if call.ragged is None:
        y: Tensor = flash_attn.flash_attn_func(*tokens_first, **options)
        return y.transpose(1, 2)
    ends = [x.to(q.device, torch.int32) for x in (call.ragged.cu_seqlens_q, call.ragged.cu_seqlens_k)]
    # A compiler does not know the lengths; the number of all tokens is an upper bound.
    lengths = call.ragged.lengths or ([q.shape[2]], [k.shape[2]])
    longest = [max(of, default=0) for of in lengths]
    y = flash_attn.flash_attn_varlen_func(*(x.squeeze(0) for x in tokens_first), *ends, *longest, **options)
    return y.unsqueeze(0).transpose(1, 2)


def _aligns(call: AttentionCall) -> bool:
    """Return True if the result depends on query alignment and the mask type does not align bottom right as
    flash-attn does.
    """
    matters = MASKS[call.mask_type][1] or call.window is not None or call.alibi_slopes is not None
    return matters and not call.mask_type.endswith("bottom_right")


def _equally_long(q: Tensor, k: Tensor, call: AttentionCall) -> bool:
    if call.ragged is None:
        return q.shape[2] == k.shape[2]
    lengths = call.ragged.lengths
    return call.ragged.cu_seqlens_q is call.ragged.cu_seqlens_k or (lengths is not None and lengths[0] == lengths[1])


# ---- FlexAttention: masks, biases, soft cap and sinks as functions of positions, compiled into one GPU kernel ----

#: Function of (batch, head, query, key) indices, all integer tensors.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Smallest head size that its kernel supports.
NARROWEST = 16


def reason_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why FlexAttention cannot run this call here, or ""."""
    if not q.is_cuda:
        return (
            "FlexAttention on a CPU has no backward, and without compilation it computes every score, as the "
            "reference does"
            if q.is_cpu
            else f"FlexAttention was not tested on {q.device.type!r}"
        )
    return unsupported_flex(q, k, v, call)


def unsupported_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why FlexAttention does not support this call on any machine, or ""."""
    if call.dropout:
        return "FlexAttention has no dropout"
    if q.dtype is torch.float64:
        return "FlexAttention does not support float64"
    if min(q.shape[-1], v.shape[-1]) < NARROWEST:
        return f"FlexAttention requires heads of at least {NARROWEST} features"
    if not min(q.shape[0], q.shape[2], k.shape[2]):
        return "there is no query or no key"
    if any(x is not None and x.requires_grad for x in (call.bias, call.alibi_slopes)):
        return "FlexAttention here has no gradient of a bias or of ALiBi's slopes"
    return ""


def attend_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return attention [B, H, Sq, Dv] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""
    if call.ragged is not None:
        # Lengths on the host would compile a new kernel for each batch.
        call = call._replace(ragged=call.ragged._replace(lengths=None))
    whole = _attend if q.is_cpu or is_tracing() else _compiled()
    return whole(q, k, v, call)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Run FlexAttention; this function is what gets compiled."""
    # Import here: from torch 2.15 on it imports sympy, which takes a quarter of a second.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    options: dict[str, Any] = {
        "score_mod": _score(q, k, call),
        "block_mask": _block_mask(q, k, call),
        "scale": call.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if call.sinks is None:
        y: Tensor = flex_attention(q, k, v, **options)
        return y
    y, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    # The sink adds a term exp(sink) to the denominator exp(lse).
    share = torch.sigmoid(aux.lse - call.sinks.to(aux.lse.dtype)[:, None])
    return (y * share.unsqueeze(-1)).to(q.dtype)


def _block_mask(q: Tensor, k: Tensor, call: AttentionCall) -> Any:
    """Return the mask of visible blocks of scores, or None if every query sees every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    rules = _visible(q, k, call)
    if not rules:
        return None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = rules[0](b, h, i, j)
        for rule in rules[1:]:
            seen = seen & rule(b, h, i, j)
        return seen

    batch, heads, queries, keys = scores_shape(q, k)
    by_pair = call.mask_type == "arbitrary" and call.mask is not None
    several = (batch if call.mask is not None else None), (heads if by_pair else None)
    return create_block_mask(visible, *several, queries, keys, device=str(q.device))


def _visible(q: Tensor, k: Tensor, call: AttentionCall) -> list[Rule]:
    """Return the conditions that must all hold for a query to see a key."""
    rules: list[Rule] = []
    if call.mask_type == "arbitrary":
        assert isinstance(call.mask, Tensor)
        pairs = call.mask.reshape((1,) * (4 - call.mask.dim()) + tuple(call.mask.shape)).expand(scores_shape(q, k))
        rules.append(lambda b, h, i, j: ~pairs[b, h, i, j])
    elif call.mask is not None:
        query_mask, key_mask = both(call.mask)
        rules.append(lambda b, h, i, j: ~(query_mask[b, i] | key_mask[b, j]))
    if call.ragged is not None:
        ours, theirs = call.ragged.sequence_of_tokens(q.shape[2], k.shape[2], q.device)
        rules.append(lambda b, h, i, j: ours[i] == theirs[j])
    left, right = bounds(call.mask_type, call.window)
    if left >= 0 or right >= 0:
        ahead = _ahead(q, k, call)
        if right >= 0:
            rules.append(lambda b, h, i, j: ahead(b, h, i, j) <= right)
        if left >= 0:
            rules.append(lambda b, h, i, j: ahead(b, h, i, j) >= -left)
    if call.chunk is not None:
        rules.append(_same_chunk(q, k, call, call.chunk))
    return rules


def _same_chunk(q: Tensor, k: Tensor, call: AttentionCall, chunk: int) -> Rule:
    """Return the condition that a key is in the query's chunk of positions."""
    ahead, shape = _ahead(q, k, call), scores_shape(q, k)
    where = positions_of_keys(call.mask_type, call.mask, shape, q.device, call.ragged).flatten(1).expand(shape[0], -1)

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return where[b, j] // chunk == (where[b, j] - ahead(b, h, i, j)) // chunk

    return same


def _ahead(q: Tensor, k: Tensor, call: AttentionCall) -> Rule:
    """Return the function that gives a key's position minus a query's, aligned by the mask type."""
    queries, keys = q.shape[2], k.shape[2]
    bottom_right = call.mask_type.endswith("bottom_right")
    if call.ragged is not None:
        ours, theirs = call.ragged.positions(queries, keys, bottom_right, q.device)
        return lambda b, h, i, j: theirs[j] - ours[i]
    if not bottom_right:
        return lambda b, h, i, j: j - i
    if call.mask is None:
        return lambda b, h, i, j: j - i - (keys - queries)
    padded_queries, padded_keys = both(call.mask)
    shift = (~padded_keys).sum(-1) - (~padded_queries).sum(-1)
    return lambda b, h, i, j: j - i - shift[b]


def _score(q: Tensor, k: Tensor, call: AttentionCall) -> Callable[..., Tensor] | None:
    """Return the function that caps a scaled score and adds the bias; None if there is neither."""
    cap, bias, slopes = call.soft_cap, call.bias, call.alibi_slopes
    if cap is None and bias is None and slopes is None:
        return None
    whole = None if bias is None else bias.expand(scores_shape(q, k))
    steep = None if slopes is None else slopes.float().expand(q.shape[0], -1)
    ahead = _ahead(q, k, call)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        if whole is not None:
            s = s + whole[b, h, i, j]
        if steep is not None:
            s = s - steep[b, h] * ahead(b, h, i, j).abs()
        return s

    return score


# ---- torch's `scaled_dot_product_attention`; with a plain mask it saves q, k, v, the output and the logsumexp ----


def reason_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Return why SDPA cannot run this call, or ""."""
    if call.soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    return ""


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return attention [B, H, Sq, Dv] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""
    ragged = call.ragged
    if ragged is not None and ragged.lengths is not None and call.bias is None and call.mask is None:
        return _each_sequence(q, k, v, call, *ragged.lengths)
    plain = call.window is None is ragged is call.bias is call.alibi_slopes is call.chunk
    if plain and call.mask_type in ("none", "causal"):
        return _run(q, k, v, None, call.mask_type == "causal", call)
    hidden, bias = call.hidden(q, k), call.whole_bias(q, k)
    if hidden is None:
        assert bias is not None
        return _run(q, k, v, _as_queries(bias, q), False, call)
    if q.is_cpu:
        return _run(q, k, v, _joined(hidden, bias, q), False, call)
    # Not every GPU kernel returns 0 and gradients without NaN for a row that sees nothing. Let such a row see
    # everything and discard its output.
    empty = hidden.all(-1, keepdim=True)
    return torch.where(empty, 0, _run(q, k, v, _joined(hidden & ~empty, bias, q), False, call))


def _joined(hidden: Tensor, bias: Tensor | None, q: Tensor) -> Tensor:
    """Return one mask as torch takes it: boolean, True where visible, or a bias that is -inf where hidden."""
    return ~hidden if bias is None else _as_queries(bias, q).masked_fill(hidden, -torch.inf)


def _each_sequence(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, query_lengths: list[int], key_lengths: list[int]
) -> Tensor:
    if not query_lengths:
        return attend_sdpa(q, k, v, call._replace(ragged=None))
    parts = zip(q.split(query_lengths, 2), k.split(key_lengths, 2), v.split(key_lengths, 2), strict=True)
    # Concatenated with heads inside tokens, the layout that a kernel writes.
    return torch.cat([_alone(*part, call).transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _alone(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Run one sequence of a ragged batch."""
    aligned = call.alibi_slopes is not None or call.chunk is not None
    mask_type, window = simplify(call.mask_type, call.window, q.shape[2], k.shape[2], aligned)
    return attend_sdpa(q, k, v, call._replace(ragged=None, mask_type=mask_type, window=window))


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: AttentionCall) -> Tensor:
    width = v.shape[-1]
    shared = q.shape[1] != k.shape[1]
    if q.is_cpu:
        if width != q.shape[-1] and not call.dropout:
            return _padded(q, k, v, mask, causal, call)
    elif shared and (mask is not None or q.dtype not in (torch.float16, torch.bfloat16)):
        # On a GPU only 16-bit kernels without a mask support shared heads; otherwise torch would save all
        # probabilities.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, call.dropout, is_causal=causal, scale=call.scale, enable_gqa=shared
    )


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: AttentionCall) -> Tensor:
    """Pad heads with zeros: the CPU kernel requires the same head size for q, k and v. The result is unchanged."""
    width = v.shape[-1]
    most = max(width, q.shape[-1])
    q, k, v = (F.pad(x, (0, most - x.shape[-1])) if x.shape[-1] < most else x for x in (q, k, v))
    return _run(q, k, v, mask, causal, call)[..., :width]


def _as_queries(bias: Tensor, q: Tensor) -> Tensor:
    """Convert a bias: the CPU kernel takes float32 with 16-bit queries, GPU kernels the dtype of the queries."""
    if q.is_cpu and q.dtype in (torch.float16, torch.bfloat16):
        return bias.float()
    return bias.to(q.dtype)


# ---- reference: plain attention with all scores in float32 or float64, to test the others against ----


def attend_reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Return softmax(q kᵀ scale) v [B, H, Sq, Dv] in q's dtype, for q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk,
    Dv].

    Bounded: relative RMS 1e-6 of float64 in float32, without dropout.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], k.shape[1]
    # Each key head serves the next heads / groups query heads: [B, G, H / G, S, D].
    wide, keys, values = q.to(dtype).unflatten(1, (groups, heads // groups)), k.to(dtype), v.to(dtype)
    scores = (wide @ keys.unsqueeze(2).mT).flatten(1, 2) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    bias, hidden = call.whole_bias(q, k), call.hidden(q, k)
    if bias is not None:
        scores = scores + bias.to(dtype)
        hides = bias.detach() == -torch.inf
        hidden = hides if hidden is None else hidden | hides
    probabilities = F.dropout(softmax(scores, hidden, call.sinks), call.dropout)
    out = probabilities.unflatten(1, (groups, heads // groups)) @ values.unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype)


def softmax(scores: Tensor, hidden: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last axis of [B, H, Sq, Sk], with an extra column of logits sinks [H] that is dropped from the
    result.

    Rows that are hidden completely are 0, and so are their gradients.
    """
    keys = scores.shape[-1]
    empty = None
    if hidden is not None:
        empty = hidden.all(-1, keepdim=True)
        # A row of only -inf would be NaN, also in the gradient.
        scores = torch.where(hidden, torch.where(empty, 0.0, -torch.inf).to(scores.dtype), scores)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = torch.softmax(scores, -1)[..., :keys]
    return probabilities if empty is None else probabilities.masked_fill(empty, 0)


# ---- quantized operands of attention: a matrix per (batch, head), stored in two tensors ----


class QuantizedHeads(NamedTuple):
    """Matrices [rows, k] for every (batch, head), each quantized on its own; original ≈ data × scale."""

    #: float8 [B, H, rows, k].
    data: Tensor
    #: float32, or E8M0 exponents as uint8: [B, H, blocks of rows, blocks of k].
    scale: Tensor
    #: Spec with which each matrix is quantized.
    spec: QuantSpec

    def part(self, batch: slice, heads: slice) -> "QuantizedHeads":
        return QuantizedHeads(self.data[batch, heads], self.scale[batch, heads], self.spec)

    def decode(self) -> Tensor:
        """Return the dequantized matrices data × scale, float64 [B, H, rows, k]."""
        scale = decode_scales(self.scale, self.spec, None).double()
        width = self.spec.block[1]
        if width is not None and width > 1:
            scale = scale.repeat_interleave(width, -1)[..., : self.data.shape[-1]]
        return self.data.float().double().mul_(scale)


def quantize_heads(x: Tensor, spec: QuantSpec) -> QuantizedHeads:
    """Quantize x [B, H, rows, k] along k, every (batch, head) on its own.

    Exact: the bits of `quaver.reference.quantize` of each matrix.
    """
    batch, heads, rows, k = x.shape
    # A per-matrix scale equals a per-row scale of the flattened matrix.
    whole = spec.per_tensor
    line = QuantSpec(spec.format, (1, None), spec.scale) if whole else spec
    lines = x.reshape(batch * heads, rows * k) if whole else x.reshape(batch * heads * rows, k)
    # Make it contiguous: a transposed input would return a transposed result.
    q = ops.QUANTIZE(lines.contiguous(), line).plain()
    return QuantizedHeads(q.data.view(x.shape), _as_tensor(q.scale, x).view(scales_shape(tuple(x.shape), spec)), spec)


def quantize_along_rows(x: Tensor, spec: QuantSpec, known: QuantizedHeads) -> QuantizedHeads | None:
    """Quantize x.T [B, H, k, rows] along rows; return None if that equals the transpose of `known`, x quantized
    along k.
    """
    return None if known.spec == spec and spec.transposable else quantize_heads(x.mT, spec)


def along_rows(known: QuantizedHeads | None, transposed: QuantizedHeads | None) -> Tensor:
    """Return float64 values [B, H, rows, k] quantized along rows, from the result of `quantize_along_rows`."""
    if transposed is not None:
        return transposed.decode().mT
    assert known is not None
    return known.decode()


def scales_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """Return the shape of the scales of matrices [B, H, rows, k]."""
    return (*shape[:2], *spec.blocks(*shape[2:]))


def empty_heads(like: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> QuantizedHeads:
    """Return an uninitialized result of `quantize_heads` for a tensor of this shape."""
    data = like.new_empty(shape, dtype=storage(spec.format))
    narrow = torch.uint8 if spec.scale == "e8m0" else torch.float32
    return QuantizedHeads(data, like.new_empty(scales_shape(shape, spec), dtype=narrow), spec)


def _as_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    assert isinstance(scale, Tensor) or math.prod(like.shape[:2]) == 1
    return scale if isinstance(scale, Tensor) else like.new_full((1, 1), scale, dtype=torch.float32)
