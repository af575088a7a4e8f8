"""torch's `scaled_dot_product_attention`: of a plain mask it keeps q, k, v, the output and a logarithm for backward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.blocks.attention.inputs.call import Call
from quaver.torch.blocks.attention.inputs.masks import simplify


def reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """ "" to take the call, else why not."""
    if call.soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if call.sinks is not None:
        return "scaled_dot_product_attention has no sinks"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
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


def _each_sequence(q: Tensor, k: Tensor, v: Tensor, call: Call, of_queries: list[int], of_keys: list[int]) -> Tensor:
    if not of_queries:
        return attend(q, k, v, call._replace(ragged=None))
    parts = zip(q.split(of_queries, 2), k.split(of_keys, 2), v.split(of_keys, 2), strict=True)
    # Joined with the heads inside the tokens, as a kernel writes them.
    return torch.cat([_alone(*part, call).transpose(1, 2) for part in parts], 1).transpose(1, 2)


def _alone(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """One sequence of a ragged batch."""
    aligned = call.alibi_slopes is not None or call.chunk is not None
    mask_type, window = simplify(call.mask_type, call.window, q.shape[2], k.shape[2], aligned)
    return attend(q, k, v, call._replace(ragged=None, mask_type=mask_type, window=window))


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: Call) -> Tensor:
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


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: Call) -> Tensor:
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
