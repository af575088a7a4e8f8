"""Convert the attention of a transformers layer to `MultiheadAttention` or `LatentAttention`.

Matrix sizes, attributes and the configuration give most options. For what they leave open (rope, row order, ALiBi),
candidates are tried and compared with the layer's own output.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.huggingface.call import ATTENTION, LayerArguments, ObservedCall, asks_for_alibi, attribute
from quaver.torch.conversion.huggingface.roles import Rows, fill, linear_of, norm_of
from quaver.torch.nn.attention.latent import LatentAttention, LatentConfig
from quaver.torch.nn.attention.multihead import MultiheadAttention
from quaver.torch.nn.attention.relative_bias import RelativePositionBias
from quaver.torch.nn.attention.rope import RotaryEmbedding

#: Roles of the up-projections that only latent attention has.
LATENT = ("q_up", "kv_up")


@dataclass(frozen=True)
class HeadShape:
    """Number of query heads, number of key/value groups, and head size."""

    heads: int
    groups: int
    dim: int


def attentions(
    layer: nn.Module,
    roles: Mapping[str, str],
    layer_context: LayerArguments,
    observed: ObservedCall,
    fused: bool | None,
) -> Iterator[tuple[dict[str, Any], MultiheadAttention | LatentAttention]]:
    """Yield candidates for the layer's attention.

    Args:
        layer: the transformers layer.
        roles: module names by role, from `roles_of`.
        layer_context: configuration and mask kind of the layer.
        observed: the observed call of the layer.
        fused: True for one qkv matrix, False for separate ones, None to keep the layer's form.
    Returns:
        Pairs of options for a `TransformerLayer` and an attention module with the layer's parameters, without a norm in
        front.
    Raises:
        ValueError: matrix sizes do not match heads, or a norm has no equivalent.
    """
    known = (*ATTENTION, *LATENT, "o")
    linears = {role: linear_of(layer.get_submodule(name)) for role, name in roles.items() if role in known}
    if "kv_down" in linears:
        return _latents(layer, layer_context, linears, observed)
    counts = _heads(layer_context, linears)
    whole = "qkv" in linears
    together = whole if fused is None else fused
    base = _options(layer, layer_context, counts, linears) | {"fused": together}
    norms, scope = _head_norms(observed, counts)
    ropes = _rope_candidates(layer_context, counts.dim, observed.output.device)
    orders = list(_orders(counts)) if whole else [None]
    alibis = (False, True) if asks_for_alibi(layer) else (False,)
    afters = (False, True) if norms else (False,)

    def candidates() -> Iterator[tuple[dict[str, Any], MultiheadAttention]]:
        for rope, rows, alibi, after in itertools.product(ropes, orders, alibis, afters):
            options = base | {"rope": rope, "alibi": alibi, "qk_norm_after_rope": after, "qk_norm_scope": scope}
            # Any norm kind will do: the modules are replaced below.
            options["qk_norm"] = "RMSNorm" if norms else None
            ours: Any = MultiheadAttention(linears["o"][0].shape[0], counts.heads, device="meta", **options)
            _fill(ours, linears, rows, counts)
            if options["sinks"] is not None:
                ours.core.register_parameter("sinks", attribute(layer, "sinks"))
            for name, norm in zip(("q_norm", "k_norm"), norms, strict=False):
                ours.register_module(name, norm)
            yield options, ours

    return candidates()


def _latents(
    layer: nn.Module,
    layer_context: LayerArguments,
    linears: Mapping[str, Any],
    observed: ObservedCall,
) -> Iterator[tuple[dict[str, Any], LatentAttention]]:
    """Yield candidates for multi-head latent attention, as `attentions` does."""
    heads, rows = (
        layer_context.config.num_attention_heads,
        {role: weight.shape[0] for role, (weight, _) in linears.items()},
    )
    kv_rank = linears["kv_up"][0].shape[1]
    rope_dim, value_dim = rows["kv_down"] - kv_rank, linears["o"][0].shape[1] // heads
    q_rank = rows.get("q_down")
    latent = LatentConfig(
        kv_rank=kv_rank,
        plain_dim=rows["kv_up"] // heads - value_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        q_rank=q_rank,
    )
    base = {
        "scale": attribute(layer, "scaling"),
        "mask_type": "causal" if layer_context.causal else "none",
        "window": layer_context.window,
        "bias": linears["kv_down"][1] is not None,
        "out_bias": linears["o"][1] is not None,
    }
    norms = [norm_of(event.module, event.input.shape[-1]) for event in observed.head_norms()]
    names = ("kv_norm",) if q_rank is None else ("q_norm", "kv_norm")

    def candidates() -> Iterator[tuple[dict[str, Any], LatentAttention]]:
        for rope in _rope_candidates(layer_context, rope_dim, observed.output.device):
            options = base | {"rope": rope}
            ours = LatentAttention(linears["o"][0].shape[0], heads, latent, device="meta", **options)
            for role, parameters in linears.items():
                fill(ours._modules[f"{role}_proj"], [parameters])
            for name, norm in zip(names, norms, strict=True):
                ours.register_module(name, norm)
            yield options | {"latent": latent}, ours

    return candidates()


def _rope_candidates(layer_context: LayerArguments, dim: int, device: torch.device) -> list[RotaryEmbedding | None]:
    """Return the rope variants to try: half-split, interleaved, and none."""
    if getattr(layer_context.config, "rope_parameters", None) is None:
        return [None]
    return [_rope(layer_context, dim, False, device), _rope(layer_context, dim, True, device), None]


def _options(
    layer: nn.Module, layer_context: LayerArguments, counts: HeadShape, linears: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that the layer's attributes and the configuration determine."""
    scale = attribute(layer, "scaling", attribute(layer, "softmax_scale", attribute(layer, "inv_norm_factor")))
    use_rope = attribute(layer, "use_rope", True)
    tempered = bool(attribute(layer, "attn_temperature_tuning", False)) and not use_rope
    has_bias = linears["qkv" if "qkv" in linears else "q"][1] is not None
    sinks = attribute(layer, "sinks")
    return {
        "groups": counts.groups,
        "head_dim": counts.dim,
        "scale": None if scale is None else float(scale),
        "soft_cap": attribute(layer, "attn_logit_softcapping"),
        "mask_type": "causal" if layer_context.causal else "none",
        "window": layer_context.window,
        "chunk": layer_context.chunk,
        "sinks": None if sinks is None else "learnable",
        "temperature": (attribute(layer, "attn_scale"), attribute(layer, "floor_scale")) if tempered else None,
        "position_bias": _position_bias(layer, counts.heads, layer_context),
        "bias": has_bias,
        "key_bias": linears["k"][1] is not None if "k" in linears and has_bias else None,
        "out_bias": linears["o"][1] is not None,
    }


def _heads(layer_context: LayerArguments, linears: Mapping[str, Any]) -> HeadShape:
    """Compute heads, groups and head size from matrix sizes and the configuration's number of query heads."""
    heads = layer_context.config.num_attention_heads
    width = linears["o"][0].shape[1]
    dim, left = divmod(width, heads)
    rows = linears["k"][0].shape[0] if "k" in linears else (linears["qkv"][0].shape[0] - width) // 2
    groups, rest = divmod(rows, dim or 1)
    if left or rest or not groups or heads % groups:
        raise ValueError(
            f"matrices of {width} and {rows} rows do not divide into {heads} heads of one size with keys of their own"
        )
    return HeadShape(heads, groups, dim)


def _orders(counts: HeadShape) -> Iterator[Rows | None]:
    """Yield functions that reorder the rows of a fused qkv matrix to Quaver's order; None if they already match.

    The other order is group by group (Falcon), which equals GPT-NeoX's head by head if each head has its own keys.
    """
    yield None
    shared = counts.heads // counts.groups

    def by_group(rows: Tensor) -> Tensor:
        grouped = rows.unflatten(0, (counts.groups, shared + 2, counts.dim))
        return torch.cat([part.flatten(0, 2) for part in grouped.split([shared, 1, 1], 1)])

    yield by_group


def _rope(layer_context: LayerArguments, dim: int, interleaved: bool, device: torch.device) -> RotaryEmbedding:
    scaling = layer_context.config.rope_parameters
    if layer_context.kind in scaling:
        scaling = scaling[layer_context.kind]
    longest = getattr(layer_context.config, "max_position_embeddings", None)
    return RotaryEmbedding(dim, scaling=scaling, max_positions=longest, interleaved=interleaved, device=device)


def _position_bias(layer: nn.Module, heads: int, layer_context: LayerArguments) -> RelativePositionBias | None:
    table = attribute(layer, "relative_attention_bias")
    if table is None:
        return None
    distance = attribute(layer, "relative_attention_max_distance")
    ours = RelativePositionBias(heads, table.weight.shape[0], distance, not layer_context.causal, device="meta")
    ours.weight = table.weight
    return ours


def _head_norms(observed: ObservedCall, counts: HeadShape) -> tuple[list[nn.Module], str]:
    """Return Quaver's equivalents of the query and key norms, and their scope: "head", "each_head" or "all_heads"."""
    norms = observed.head_norms()
    if not norms:
        return [], "head"
    if len(norms) != 2:
        raise ValueError(
            f"attention has {len(norms)} norms inside; a TransformerLayer has one of queries and one of keys"
        )
    scope = "head"
    if norms[0].input.shape[-1] == counts.heads * counts.dim != counts.dim:
        scope = "all_heads"
    elif any(p.dim() == 2 for p in norms[0].module.parameters()):
        scope = "each_head"
    return [norm_of(event.module, event.input.shape[-1]) for event in norms], scope


def _fill(ours: Any, linears: Mapping[str, Any], rows: Rows | None, counts: HeadShape) -> None:
    """Set the parameters of Quaver's projections from the layer's matrices, joined or split as needed."""
    fill(ours.o_proj, [linears["o"]])
    if "qkv" not in linears:
        each = [linears["q"], linears["k"], linears["v"]]
        if len(ours._parts) == 1:
            fill(ours.qkv_proj, each)
        else:
            for name, part in zip(("q_proj", "k_proj", "v_proj"), each, strict=True):
                fill(getattr(ours, name), [part])
        return
    if len(ours._parts) == 1:
        fill(ours.qkv_proj, [linears["qkv"]], rows)
        return
    wide, narrow = counts.heads * counts.dim, counts.groups * counts.dim
    begin = 0
    for name, width in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)):

        def take(whole: Tensor, begin: int = begin, width: int = width) -> Tensor:
            return (whole if rows is None else rows(whole))[begin : begin + width].clone()

        fill(getattr(ours, name), [linears["qkv"]], take)
        begin += width
