"""The layers of a decoder, each of the kind that its configuration gives it."""

from typing import Any

import torch
from torch import nn

from quaver.torch.blocks.attention.latent import Latent
from quaver.torch.blocks.attention.rope.embedding import RotaryEmbedding
from quaver.torch.blocks.experts.mixture import Mixture
from quaver.torch.blocks.state_space.layer import Mamba2Layer
from quaver.torch.blocks.transformer import TransformerLayer
from quaver.train.configuration.sizes import ExpertSizes, ModelConfig

#: What a configuration and a layer of any kind call alike, what one with attention has besides, and what heads of one
#: kind have that latent ones have not.
SAME = ("activation", "normalization", "eps", "zero_centered", "bias")
OF_ATTENTION = ("norm_position", "parallel", "scale", "soft_cap")
OF_HEADS = ("groups", "head_dim", "qk_norm")


def rope_of(config: ModelConfig) -> RotaryEmbedding | None:
    """The rotary embedding that layers share; None where queries and keys are not turned."""
    if not config.turns or not config.numbers("attention", "experts"):
        return None
    return RotaryEmbedding(
        config.head_dim if config.latent is None else config.latent.rope_dim,
        theta=config.theta,
        fraction=config.fraction,
        scaling=dict(config.scaling) or None,
        max_positions=config.positions,
    )


def layer_of(config: ModelConfig, number: int, rope: RotaryEmbedding | None, recompute: str) -> nn.Module:
    """The layer of this number, whose parameters are float32."""
    kind = config.kind(number)
    if kind in ("state", "state-mlp"):
        return _state(config, config.hidden if kind == "state-mlp" else None, recompute)
    names = SAME + OF_ATTENTION + (OF_HEADS if config.latent is None else ())
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.latent is not None:
        sizes = config.latent
        options["latent"] = Latent(
            q_rank=sizes.q_rank,
            kv_rank=sizes.kv_rank,
            plain_dim=sizes.plain_dim,
            rope_dim=sizes.rope_dim,
            value_dim=sizes.value_dim,
        )
    experts = config.experts if kind == "experts" else None
    return TransformerLayer(
        config.dim,
        config.heads,
        config.hidden if experts is None else experts.hidden,
        mixture=None if experts is None else mixture_of(experts),
        mask_type="causal",
        window=config.window(number),
        fused=False,
        rope=rope,
        recompute=None if recompute == "none" else recompute,
        dtype=torch.float32,
        **options,
    )


def mixture_of(experts: ExpertSizes) -> Mixture:
    """How the tokens of a layer choose experts."""
    return Mixture(
        experts=experts.number,
        k=experts.chosen,
        scores=experts.scores,
        groups=experts.groups,
        top_groups=experts.top_groups,
        best_of_group=experts.best_of_group,
        scale=experts.scale,
        balance_bias=experts.bias_rate > 0,
        shared=experts.shared,
        shared_fused=False,
        capacity=experts.capacity or None,
        return_routing=True,
    )


def _state(config: ModelConfig, hidden: int | None, recompute: str) -> Mamba2Layer:
    sizes = config.state
    assert sizes is not None
    same: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    return Mamba2Layer(
        config.dim,
        hidden=hidden,
        inner=sizes.inner,
        head_dim=sizes.head_dim,
        state=sizes.state,
        groups=sizes.groups,
        taps=sizes.taps,
        fused=False,
        recompute="full" if recompute == "full" else None,
        dtype=torch.float32,
        **same,
    )
