"""The function `attention`: softmax(q kᵀ scale) v with common masks and options, and its implementations."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver import recipes
from quaver.recipes.spec import AttentionSpec, Recipe
from quaver.reference.attention import OFF_BY_ONE, check_chunk, check_numbers
from quaver.torch.nn.attention import backends
from quaver.torch.nn.attention.fp8 import attention_fp8
from quaver.torch.nn.attention.inputs import (
    AttentionCall,
    CuSeqlens,
    Mask,
    Window,
    all_heads_first,
    check_fits,
    check_mask,
    heads_back,
    ragged_of,
    simplify,
)
from quaver.torch.operations import ops
from quaver.torch.operations.operation import Implementation, Operation

ATTENTION: Operation[Tensor] = Operation(
    "attention",
    [
        Implementation("flash", backends.attend, backends.reason),
        Implementation("sdpa", backends.attend_sdpa, backends.reason_sdpa),
        Implementation("flex", backends.attend_flex, backends.reason_flex),
        Implementation("reference", backends.attend_reference),
    ],
)


class AttentionOpOptions(NamedTuple):
    """The options of `attention` as passed by the caller; see there."""

    mask_type: str = "none"
    mask: Mask | None = None
    window: Window | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: str | Tensor | None = None
    scale: float | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    layout: str = "bshd"
    cu_seqlens: CuSeqlens | None = None
    chunk: int | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_type: str = "none",
    mask: Mask | None = None,
    window: Window | None = None,
    chunk: int | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: str | Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    layout: str = "bshd",
    cu_seqlens: CuSeqlens | None = None,
    recipe: str | Recipe | None = None,
) -> Tensor:
    """Compute attention of [B, Sq, H, D] on [B, Sk, G, D]; each of G key heads serves H / G query heads (MQA, GQA).

    Args:
        q: [B, Sq, H, D], or as `layout` says.
        k: [B, Sk, G, D].
        v: [B, Sk, G, Dv].
        mask_type: a name of `quaver.reference.attention.MASKS`. "causal" hides key j from query i if j > i; with
            "_bottom_right" the last query sees the last key: if j > i + (keys - queries), without padding. "padding"
            takes a mask of tokens, "arbitrary" one of pairs.
        mask: True where masked out. Padding: [B, Sk] for both queries and keys, or ([B, Sq], [B, Sk]). Arbitrary:
            broadcastable to [B, H, Sq, Sk].
        window: (left, right): a query sees that many keys before and after its own position, -1 for all. Positions are
            aligned as the mask type says.
        chunk: a query sees only keys in its own chunk of this many positions, counted from the first token that is not
            padding (Llama 4); None for all.
        bias: added to the scores; broadcastable to [B, H, Sq, Sk]. -inf hides, as a mask does.
        alibi_slopes: [H] or [B, H]: score -= slope × distance, with positions aligned as the mask type says.
        sinks: an extra softmax column whose value is 0: logits [H], or "off_by_one" for logits of 0.
        scale: factor of the scores; None is 1 / sqrt(D).
        soft_cap: scores become cap tanh(scores / cap), before bias and mask (Gemma-2).
        dropout: probability of dropping an attention weight, always applied; the others are scaled by 1 / (1 -
            dropout).
        layout: "bshd", "sbhd" ([S, B, H, D]) or "thd", concatenated sequences [T, H, D] with cu_seqlens.
        cu_seqlens: int [sequences + 1], start of each sequence and end of the last; a pair (of queries, of keys) if
            they differ. On the CPU it avoids a GPU synchronization. Masks, windows and ALiBi apply within a sequence.
        recipe: recipe whose `attention` quantizes q, k, v, the probabilities and their gradients; None does not
            quantize.
    Returns:
        [B, Sq, H, Dv] in q's dtype, or as the layout. A query that sees no key gets 0 and zero gradients.
    Raises:
        ValueError: shapes, heads, dtypes, masks, windows or cumulative lengths that do not fit.
    Bounded: relative RMS 1e-6 of float64 in float32, without dropout. Statistical with it.
    Source: Vaswani et al. 2017 §3.2; GQA: Ainslie et al. 2023; ALiBi: Press et al. 2022; sinks: gpt-oss, Miller 2023.
    """
    if isinstance(recipe, str):
        recipe = recipes.get(recipe)
    if (
        mask is None
        and (mask_type == "causal" or mask_type == "none")
        and layout == "bshd"
        and window is None is bias is None is alibi_slopes
        and sinks is None is soft_cap is None is cu_seqlens is None is chunk
        and (recipe is None or recipe.attention is None)
        and ATTENTION.enabled is ATTENTION.implementations
        and (q.is_cpu or not backends.INSTALLED)
        and 0 <= dropout < 1
        and _plain(q, k, v)
    ):
        # Fast path: validating masks and options would take as long as the kernel of a small layer.
        return _as_it_is(q, k, v, mask_type == "causal", dropout, scale)
    options = AttentionOpOptions(
        *(mask_type, mask, window, bias, alibi_slopes, sinks, scale, soft_cap, dropout, layout, cu_seqlens, chunk)
    )
    wide, keys, values, call = prepare(q, k, v, options)
    spec = None if recipe is None else recipe.attention
    kind = ops.autocast_device(q)
    if not torch.is_autocast_enabled(kind):
        return heads_back(_run(wide, keys, values, call, spec), layout)
    # Autocast would narrow the reference's float32, and a bias.
    with torch.autocast(kind, enabled=False):
        return heads_back(_run(wide, keys, values, call, spec), layout)


def _as_it_is(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, scale: float | None) -> Tensor:
    """Compute attention of [B, S, H, D] without mask tensors, by torch's SDPA."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    return y.transpose(1, 2)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOpOptions
) -> tuple[Tensor, Tensor, Tensor, AttentionCall]:
    """Return q [B, H, Sq, D], k [B, G, Sk, D], v [B, G, Sk, Dv] and the options, validated and in a common form."""
    mask_type, mask, window, bias, alibi_slopes, sinks, scale, soft_cap, dropout, layout, cu_seqlens, chunk = options
    kind = ops.autocast_device(q)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if x.dtype in ops.DTYPES else x for x in (q, k, v))
    q, k, v = all_heads_first(layout, q, k, v)
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    shape = (batch, heads, queries, keys)
    ragged = ragged_of(layout, cu_seqlens, queries, keys)
    check_mask(mask_type, mask, window, shape, ragged is not None)
    check_chunk(chunk)
    if bias is not None:
        check_fits("bias", bias, shape)
        if bias.dtype is torch.bool:
            raise ValueError("the bias is boolean; give a mask of pairs as `mask` with mask_type 'arbitrary'")
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    if isinstance(sinks, str) and sinks == OFF_BY_ONE:
        sinks = q.new_zeros(heads, dtype=torch.float32)
    if alibi_slopes is not None and _shape(alibi_slopes) not in ((heads,), (batch, heads)):
        description = (
            f"has shape {list(alibi_slopes.shape)}" if isinstance(alibi_slopes, Tensor) else f"is {alibi_slopes!r}"
        )
        raise ValueError(f"alibi_slopes {description}; give [heads] = [{heads}] or [batch, heads]")
    if sinks is not None and _shape(sinks) != (heads,):
        description = f"of shape {list(sinks.shape)}" if isinstance(sinks, Tensor) else repr(sinks)
        raise ValueError(f"sinks is {description}; give 'off_by_one', or a tensor of logits [heads] = [{heads}]")
    check_numbers(soft_cap, dropout)
    assert not isinstance(sinks, str)
    if ragged is None:
        aligned = alibi_slopes is not None or chunk is not None
        mask_type, window = simplify(mask_type, window, queries, keys, aligned)
    scale = (1 / math.sqrt(dim) if dim else 1.0) if scale is None else scale
    return (
        q,
        k,
        v,
        AttentionCall(mask_type, mask, window, bias, alibi_slopes, sinks, scale, soft_cap, dropout, ragged, chunk),
    )


def _shape(x: object) -> tuple[int, ...] | None:
    return tuple(x.shape) if isinstance(x, Tensor) else None


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if scaled_dot_product_attention supports these tensors unchanged with its best kernel."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return False
    batch, _, heads, dim = q.shape
    b, s, groups, d = k.shape
    return (
        k.shape == v.shape
        and batch == b
        and dim == d
        and s > 0
        and (heads == groups or (groups > 0 and heads % groups == 0 and (q.is_cpu or q.dtype in HALF)))
        and q.dtype is k.dtype is v.dtype
        and q.is_floating_point()
    )


HALF = (torch.float16, torch.bfloat16)


def _run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, spec: AttentionSpec | None) -> Tensor:
    return ATTENTION(q, k, v, call) if spec is None else attention_fp8(q, k, v, call, spec)
