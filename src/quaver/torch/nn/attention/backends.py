"""The flash-attn package, where it is installed: causal, windows, ALiBi, soft cap, ragged batches, no masks as tensors.

It aligns everything bottom right.
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

# ---- flash -----------------------------------------------------------------------------------------------

#: True if flash-attn can be imported.
INSTALLED = find_spec("flash_attn") is not None


def reason(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """ "" to take the call, else why not."""
    if not INSTALLED:
        return "flash-attn is not installed"
    if not q.is_cuda:
        return f"flash-attn runs on GPUs, and this is {q.device.type!r}"
    return unsupported(q, k, v, call)


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why flash-attn does not serve this call on any machine; "" if it does."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 and bfloat16, not {q.dtype}"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] > 256:
        return f"flash-attn wants q, k and v equally wide, at most 256; these are {q.shape[-1]} and {v.shape[-1]}"
    others = ("bias", call.bias), ("sinks", call.sinks), ("chunks", call.chunk)
    for name, given in (("mask of tokens or pairs", call.mask), *others):
        if given is not None:
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
    """[B, H, Sq, D] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, D]."""
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
    ends = [x.to(q.device, torch.int32) for x in (call.ragged.of_queries, call.ragged.of_keys)]
    # A compiler knows no lengths; all tokens bound them.
    lengths = call.ragged.lengths or ([q.shape[2]], [k.shape[2]])
    longest = [max(of, default=0) for of in lengths]
    y = flash_attn.flash_attn_varlen_func(*(x.squeeze(0) for x in tokens_first), *ends, *longest, **options)
    return y.unsqueeze(0).transpose(1, 2)


def _aligns(call: AttentionCall) -> bool:
    """True if the result depends on where query 0 stands, and flash-attn puts it elsewhere."""
    matters = MASKS[call.mask_type][1] or call.window is not None or call.alibi_slopes is not None
    return matters and not call.mask_type.endswith("bottom_right")


def _equally_long(q: Tensor, k: Tensor, call: AttentionCall) -> bool:
    if call.ragged is None:
        return q.shape[2] == k.shape[2]
    lengths = call.ragged.lengths
    return call.ragged.of_queries is call.ragged.of_keys or (lengths is not None and lengths[0] == lengths[1])


# ---- flex ------------------------------------------------------------------------------------------------
# torch's FlexAttention: masks, biases, soft cap and sinks as functions of positions, compiled into one GPU kernel.

#: Of (batch, head, query, key), all integer tensors.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: The narrowest head that its kernel multiplies.
NARROWEST = 16


def reason_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """ "" to take the call, else why not."""
    if not q.is_cuda:
        return (
            "FlexAttention on a CPU has no backward, and not compiled it computes every score, as the reference does"
            if q.is_cpu
            else f"FlexAttention was not tried on {q.device.type!r}"
        )
    return unsupported_flex(q, k, v, call)


def unsupported_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why FlexAttention does not serve this call on any machine; "" if it does."""
    if call.dropout:
        return "FlexAttention has no dropout"
    if q.dtype is torch.float64:
        return "FlexAttention computes in float32 at most"
    if min(q.shape[-1], v.shape[-1]) < NARROWEST:
        return f"FlexAttention wants heads of at least {NARROWEST} features"
    if not min(q.shape[0], q.shape[2], k.shape[2]):
        return "there is no query or no key"
    if any(x is not None and x.requires_grad for x in (call.bias, call.alibi_slopes)):
        return "no gradient of a bias or of slopes is taken through FlexAttention"
    return ""


def attend_flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """[B, H, Sq, Dv] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""
    if call.ragged is not None:
        # The lengths on the host would make a kernel of each batch.
        call = call._replace(ragged=call.ragged._replace(lengths=None))
    whole = _attend if q.is_cpu or is_tracing() else _compiled()
    return whole(q, k, v, call)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """`attend`, as it is to be compiled."""
    # Here, since torch 2.15 imports sympy with it, a quarter of a second.
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
    # One more term exp(sink) in a denominator exp(lse).
    share = torch.sigmoid(aux.lse - call.sinks.to(aux.lse.dtype)[:, None])
    return (y * share.unsqueeze(-1)).to(q.dtype)


def _block_mask(q: Tensor, k: Tensor, call: AttentionCall) -> Any:
    """The blocks of scores that some query sees, or None if every query sees every key."""
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
    """The conditions that must all hold for a query to see a key."""
    rules: list[Rule] = []
    if call.mask_type == "arbitrary":
        assert isinstance(call.mask, Tensor)
        pairs = call.mask.reshape((1,) * (4 - call.mask.dim()) + tuple(call.mask.shape)).expand(scores_shape(q, k))
        rules.append(lambda b, h, i, j: ~pairs[b, h, i, j])
    elif call.mask is not None:
        of_queries, of_keys = both(call.mask)
        rules.append(lambda b, h, i, j: ~(of_queries[b, i] | of_keys[b, j]))
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
    """Whether a key stands in the query's chunk of positions."""
    ahead, shape = _ahead(q, k, call), scores_shape(q, k)
    where = positions_of_keys(call.mask_type, call.mask, shape, q.device, call.ragged).flatten(1).expand(shape[0], -1)

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return where[b, j] // chunk == (where[b, j] - ahead(b, h, i, j)) // chunk

    return same


def _ahead(q: Tensor, k: Tensor, call: AttentionCall) -> Rule:
    """How many positions a key lies after a query, as the mask type aligns them."""
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
    """The function of a scaled score: it is capped, then biased."""
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


# ---- sdpa ------------------------------------------------------------------------------------------------
# torch's `scaled_dot_product_attention`: of a plain mask it keeps q, k, v, the output and a logarithm for backward.


def reason_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """ "" to take the call, else why not."""
    if call.soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    return ""


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """[B, H, Sq, Dv] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""
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
    # Not every kernel of a GPU gives 0 to a row that sees nothing, and gradients without NaN: such a row sees
    # everything here, and its output is thrown away.
    empty = hidden.all(-1, keepdim=True)
    return torch.where(empty, 0, _run(q, k, v, _joined(hidden & ~empty, bias, q), False, call))


def _joined(hidden: Tensor, bias: Tensor | None, q: Tensor) -> Tensor:
    """One mask as torch takes it: True where seen, or a bias that is -inf where hidden."""
    return ~hidden if bias is None else _as_queries(bias, q).masked_fill(hidden, -torch.inf)


def _each_sequence(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, of_queries: list[int], of_keys: list[int]
) -> Tensor:
    if not of_queries:
        return attend_sdpa(q, k, v, call._replace(ragged=None))
    parts = zip(q.split(of_queries, 2), k.split(of_keys, 2), v.split(of_keys, 2), strict=True)
    # Joined with the heads inside the tokens, as a kernel writes them.
    return torch.cat([_alone(*part, call).transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _alone(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """One sequence of a ragged batch."""
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
        # On a GPU only the kernels without a mask and of 16 bits share heads; else torch would keep every probability.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, call.dropout, is_causal=causal, scale=call.scale, enable_gqa=shared
    )


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: AttentionCall) -> Tensor:
    """The CPU's kernel wants q, k and v equally wide; zeros change nothing."""
    width = v.shape[-1]
    most = max(width, q.shape[-1])
    q, k, v = (F.pad(x, (0, most - x.shape[-1])) if x.shape[-1] < most else x for x in (q, k, v))
    return _run(q, k, v, mask, causal, call)[..., :width]


def _as_queries(bias: Tensor, q: Tensor) -> Tensor:
    """The CPU's kernel takes a float32 bias to 16-bit queries; those of a GPU take one like the queries."""
    if q.is_cpu and q.dtype in (torch.float16, torch.bfloat16):
        return bias.float()
    return bias.to(q.dtype)


# ---- reference -------------------------------------------------------------------------------------------
# The plain attention that the others are held against: every score is there, in float32 or float64.


def attend_reference(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """softmax(q kᵀ scale) v, [B, H, Sq, Dv] in q's dtype, of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv].

    Bounded: relative RMS 1e-6 of float64 in float32, without dropout.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], k.shape[1]
    # Each head of k and v serves the next heads / groups heads of q: [B, G, H / G, S, D].
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
    """Over the last axis of [B, H, Sq, Sk], with one more column of logits sinks [H] that is left out again.

    Rows that are hidden throughout are 0, and so are their gradients.
    """
    keys = scores.shape[-1]
    empty = None
    if hidden is not None:
        empty = hidden.all(-1, keepdim=True)
        # A row of -inf alone would be NaN, in the gradient too.
        scores = torch.where(hidden, torch.where(empty, 0.0, -torch.inf).to(scores.dtype), scores)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = torch.softmax(scores, -1)[..., :keys]
    return probabilities if empty is None else probabilities.masked_fill(empty, 0)


# ---- operands --------------------------------------------------------------------------------------------
# Quantized operands of attention: a matrix for each (batch, head), all in two plain tensors.


class QuantizedHeads(NamedTuple):
    """Matrices [rows, k] of every (batch, head), each quantized on its own; original ≈ data × scale."""

    #: float8 [B, H, rows, k].
    data: Tensor
    #: float32 or E8M0's exponents, uint8 [B, H, blocks of rows, blocks of k].
    scale: Tensor
    #: How each matrix is quantized.
    spec: QuantSpec

    def part(self, batch: slice, heads: slice) -> "QuantizedHeads":
        return QuantizedHeads(self.data[batch, heads], self.scale[batch, heads], self.spec)

    def decode(self) -> Tensor:
        """float64 [B, H, rows, k]: data × scale."""
        scale = decode_scales(self.scale, self.spec, None).double()
        width = self.spec.block[1]
        if width is not None and width > 1:
            scale = scale.repeat_interleave(width, -1)[..., : self.data.shape[-1]]
        return self.data.float().double().mul_(scale)


def quantize_heads(x: Tensor, spec: QuantSpec) -> QuantizedHeads:
    """Quantize x [B, H, rows, k] along k, every (batch, head) as if it were alone.

    Exact: the bits of `quaver.reference.quantize` of each matrix.
    """
    batch, heads, rows, k = x.shape
    # One scale for a matrix is one scale for its elements in a row.
    whole = spec.per_tensor
    line = QuantSpec(spec.format, (1, None), spec.scale) if whole else spec
    lines = x.reshape(batch * heads, rows * k) if whole else x.reshape(batch * heads * rows, k)
    # One that lies transposed would come back so.
    q = ops.QUANTIZE(lines.contiguous(), line).plain()
    return QuantizedHeads(q.data.view(x.shape), _as_tensor(q.scale, x).view(scales_shape(tuple(x.shape), spec)), spec)


def quantize_along_rows(x: Tensor, spec: QuantSpec, known: QuantizedHeads) -> QuantizedHeads | None:
    """x.T [B, H, k, rows] quantized along rows; None where that is the transpose of what is `known` of x."""
    return None if known.spec == spec and spec.transposable else quantize_heads(x.mT, spec)


def along_rows(known: QuantizedHeads | None, transposed: QuantizedHeads | None) -> Tensor:
    """float64 [B, H, rows, k] of what was quantized along rows, given as `quantize_along_rows` leaves it."""
    if transposed is not None:
        return transposed.decode().mT
    assert known is not None
    return known.decode()


def scales_shape(shape: tuple[int, ...], spec: QuantSpec) -> tuple[int, ...]:
    """Shape of the scales of matrices [B, H, rows, k]."""
    return (*shape[:2], *spec.blocks(*shape[2:]))


def empty_heads(like: Tensor, shape: tuple[int, ...], spec: QuantSpec) -> QuantizedHeads:
    """What `quantize_heads` returns for a tensor of this shape, without values."""
    data = like.new_empty(shape, dtype=storage(spec.format))
    narrow = torch.uint8 if spec.scale == "e8m0" else torch.float32
    return QuantizedHeads(data, like.new_empty(scales_shape(shape, spec), dtype=narrow), spec)


def _as_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    assert isinstance(scale, Tensor) or math.prod(like.shape[:2]) == 1
    return scale if isinstance(scale, Tensor) else like.new_full((1, 1), scale, dtype=torch.float32)
