"""torch's FlexAttention: masks, biases, soft cap and sinks as functions of positions, compiled into one GPU kernel."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quaver.torch.blocks.attention.inputs.call import Call, scores_shape
from quaver.torch.blocks.attention.inputs.masks import both, bounds, positions_of_keys
from quaver.torch.numerics.tracing import is_tracing

#: Of (batch, head, query, key), all integer tensors.
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: The narrowest head that its kernel multiplies.
NARROWEST = 16


def reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """ "" to take the call, else why not."""
    if not q.is_cuda:
        return (
            "FlexAttention on a CPU has no backward, and not compiled it computes every score, as the reference does"
            if q.is_cpu
            else f"FlexAttention was not tried on {q.device.type!r}"
        )
    return unfit(q, k, v, call)


def unfit(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
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


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """[B, H, Sq, Dv] of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""
    if call.ragged is not None:
        # The lengths on the host would make a kernel of each batch.
        call = call._replace(ragged=call.ragged._replace(lengths=None))
    whole = _attend if q.is_cpu or is_tracing() else _compiled()
    return whole(q, k, v, call)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
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


def _block_mask(q: Tensor, k: Tensor, call: Call) -> Any:
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


def _visible(q: Tensor, k: Tensor, call: Call) -> list[Rule]:
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


def _same_chunk(q: Tensor, k: Tensor, call: Call, chunk: int) -> Rule:
    """Whether a key stands in the query's chunk of positions."""
    ahead, shape = _ahead(q, k, call), scores_shape(q, k)
    where = positions_of_keys(call.mask_type, call.mask, shape, q.device, call.ragged).flatten(1).expand(shape[0], -1)

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return where[b, j] // chunk == (where[b, j] - ahead(b, h, i, j)) // chunk

    return same


def _ahead(q: Tensor, k: Tensor, call: Call) -> Rule:
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


def _score(q: Tensor, k: Tensor, call: Call) -> Callable[..., Tensor] | None:
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
