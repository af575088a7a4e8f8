"""Transformer Engine's linen attention modules: its masks, layouts and biases for Quaver's attention."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from quaver.compat.transformer_engine.jax.flax.fields import OF_ATTENTION, constrained, parameter, part_of, refuse
from quaver.compat.transformer_engine.jax.flax.module import DenseGeneral, LayerNormDenseGeneral, stacked_init
from quaver.compat.transformer_engine.jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    SEQLEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    Axes,
)
from quaver.jax.blocks.attention import attention, relative_position_bias, rope
from quaver.jax.blocks.options import Initializer
from quaver.options import suggests
from quaver.recipes.text import check_name

#: Quaver's mask type by Transformer Engine's name, and True if a pairwise mask is combined with it.
MASKS = {
    "no_mask": ("none", False),
    "causal": ("causal", False),
    "causal_bottom_right": ("causal_bottom_right", False),
    "padding": ("none", True),
    "padding_causal": ("causal", True),
    "causal_padding": ("causal", True),
}
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias")
LAYOUTS = ("bs3hd", "bshd_bs2hd", "bshd_bshd_bshd")
SHARDED = "and shard arrays by jax.jit's shardings"


@suggests
class DotProductAttention(nn.Module):
    """Attention without parameters; a mask [batch, 1 or heads, queries, keys] is True where masked out.

    A query that sees no key gives 0. Scores and softmax are float32, regardless of `float32_logits`.

    Raises:
        ValueError: options of context parallelism, packed sequences, another softmax, `score_mod`; an unknown mask
            type, bias type or layout.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: DTypeLike = jnp.float32
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None

    @nn.compact
    def __call__(
        self, query: Array, key: Array | None = None, value: Array | None = None,
        sequence_descriptor: Array | None = None, bias: Array | None = None, *, mask: Array | None = None,
        deterministic: bool = False,
    ) -> Array:  # fmt: skip
        """Run attention; the fourth argument is a mask. Packed sequences are not supported."""
        refuse(self, SHARDED, context_parallel_causal_load_balanced=False, context_parallel_axis="")
        refuse(self, SHARDED, context_parallel_strategy="DEFAULT")
        refuse(self, "and add to scores by `bias`", score_mod=None, score_mod_bprop=None, softmax_type="vanilla")
        refuse(self, "and give a mask of pairs", max_segments_per_seq=1)
        q, k, v = self._parts(query, key, value)
        kind, pairs = _mask(self.attn_mask_type, sequence_descriptor if mask is None else mask, q.shape[1], k.shape[1])
        scale = 1 / math.sqrt(self.head_dim) if self.scale_factor is None else self.scale_factor
        options: Any = {"mask_type": kind, "mask": pairs, "window": self.window_size, "scale": scale}
        if self.attention_dropout > 0 and not deterministic:
            options |= {"dropout": self.attention_dropout, "dropout_key": self.make_rng(self.dropout_rng_name)}
        y = attention(q, k, v, bias=_bias(self.attn_bias_type, bias, scale), **options)
        y = checkpoint_name(y, self.context_checkpoint_name)
        return y.swapaxes(0, 1) if self.transpose_batch_sequence else y

    def _parts(self, query: Array, key: Array | None, value: Array | None) -> tuple[Array, ...]:
        """Return queries, keys and values [batch, tokens, heads, features] from a layout."""
        layout = self.qkv_layout.lower()
        check_name("qkv_layout", layout, LAYOUTS)
        if layout == "bs3hd":
            parts = [query[..., i, :, :] for i in range(3)]
        elif key is None or (value is None and layout == "bshd_bshd_bshd"):
            raise ValueError(f"qkv_layout is {layout!r}, and keys or values are missing; give them, or another layout")
        elif layout == "bshd_bs2hd":
            parts = [query, key[..., 0, :, :], key[..., 1, :, :]]
        else:
            assert value is not None
            parts = [query, key, value]
        return tuple(x.swapaxes(0, 1) if self.transpose_batch_sequence else x for x in parts)


def _mask(name: str, mask: Any, queries: int, keys: int) -> tuple[str, Array | None]:
    """Convert a mask type and mask to Quaver's; a pairwise mask also gets the causal mask if the type is causal."""
    check_name("attn_mask_type", name, MASKS)
    kind, takes = MASKS[name]
    if not takes or mask is None:
        return kind, None
    if not hasattr(mask, "dtype"):
        raise ValueError(
            f"a {type(mask).__name__} is no mask; give an array [batch, 1, queries, keys], True where masked out"
        )
    hidden = mask.astype(bool)
    if kind == "causal":
        hidden = hidden | (jnp.arange(keys)[None, :] > jnp.arange(queries)[:, None])
    return "arbitrary", hidden


def _bias(name: str | None, bias: Array | None, scale: float) -> Array | None:
    """Return the bias to add to scaled scores, or None."""
    if name is not None:
        check_name("attn_bias_type", name.lower(), BIASES)
        if (name.lower() == "no_bias") is (bias is not None):
            raise ValueError(f"attn_bias_type is {name!r}, and {'a' if bias is not None else 'no'} bias was given")
    return bias * scale if bias is not None and name is not None and name.lower() == "pre_scale_bias" else bias


#: Parts of a layer that have low-rank adapters, by scope.
LORA_PARTS = ("qkv_proj", "output_proj", "mlp")


def lora_scope(scope: str | None) -> dict[str, bool]:
    """Return which parts of a layer have low-rank adapters: "none", "all", one of `LORA_PARTS`, or "exclude_..."."""
    scope = "none" if scope is None else scope.lower()
    check_name("low_rank_adaptation_scope", scope, ["none", "all", *LORA_PARTS, *(f"exclude_{p}" for p in LORA_PARTS)])
    excluded = scope.removeprefix("exclude_") if scope.startswith("exclude_") else None
    return {part: scope in ("all", part) or (excluded is not None and part != excluded) for part in LORA_PARTS}


def activation_axes(module: Any, *features: str, inside: bool = False) -> Axes:
    """Return the logical axes of activations [batch, tokens, *features], or sequence first.

    Args:
        module: a module with `HeadFields`.
        features: logical axes of the features.
        inside: True between the GEMMs of a block, where the sequence is not sharded by the weights' mesh axis.
    """
    tokens = SEQLEN_TP_AXES if module.enable_sequence_parallel and not inside else SEQLEN_AXES
    return (*((tokens, BATCH_AXES) if module.transpose_batch_sequence else (BATCH_AXES, tokens)), *features)


@dataclass(kw_only=True)
class HeadFields:
    """Fields of attention with projections, shared by the module and the whole layer."""

    num_gqa_groups: int | None = None
    dropout_rng_name: str = "dropout"
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: DTypeLike = jnp.float32
    fuse_qkv_params: bool = True
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    score_mod: Any = None
    score_mod_bprop: Any = None


@suggests
class MultiHeadAttention(nn.Module, HeadFields):
    """Norm, projections, attention and output projection; returns the output, and the norm's output or None.

    Raises:
        ValueError: decoding with a cache.
    """

    head_dim: int
    num_attention_heads: int
    attention_dropout: float = field(default=0.0, kw_only=True)
    input_layernorm: bool = field(default=True, kw_only=True)
    return_layernorm_output: bool = field(default=False, kw_only=True)
    kernel_init: Initializer | None = field(default=None, kw_only=True)
    attn_mask_type: str = field(default="causal", kw_only=True)
    attn_bias_type: str | None = field(default=None, kw_only=True)
    transpose_batch_sequence: bool = field(default=False, kw_only=True)
    float32_logits: bool = field(default=False, kw_only=True)

    @nn.compact
    def __call__(
        self, inputs_q: Array, inputs_kv: Array, mask: Array | None = None, bias: Array | None = None, *,
        decode: bool = False, deterministic: bool = False,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        adapted = lora_scope(self.low_rank_adaptation_scope)
        if decode:
            raise ValueError("decode=True is not supported: modules for JAX have no cache; run all tokens again")
        itself = inputs_q is inputs_kv
        inputs_q = constrained(inputs_q, activation_axes(self, HIDDEN_AXES))
        inputs_kv = inputs_q if itself else constrained(inputs_kv, activation_axes(self, HIDDEN_AXES))
        q, k, v, normed = self._projected(inputs_q, inputs_kv, adapted["qkv_proj"])
        q, k, v = (constrained(x, activation_axes(self, HEAD_AXES, HIDDEN_AXES, inside=True)) for x in (q, k, v))
        if self.enable_rotary_pos_emb:
            q, k = self._apply_rope(q), self._apply_rope(k)
        core = part_of(self, DotProductAttention, scale_factor=None if self.scale_attn_logits else 1.0)
        y = core(q, k, v, bias=bias, mask=mask, deterministic=deterministic)
        init = self.kernel_init or OF_ATTENTION
        out = part_of(
            self,
            DenseGeneral,
            features=inputs_q.shape[-1],
            kernel_init=init,
            kernel_axes=(W_TP_AXES, W_FSDP_AXES),
            bias_axes=(W_NO_SHARD_AXES,),
            enable_low_rank_adaptation=adapted["output_proj"],
            name="out",
        )
        y = constrained(y.reshape(*y.shape[:2], -1), activation_axes(self, HIDDEN_TP_AXES, inside=True))
        return out(y), normed if self.return_layernorm_output else None

    def _projected(self, x: Array, memory: Array, adapted: bool) -> tuple[Array, Array, Array, Array | None]:
        """Return queries, keys and values [., ., heads, head_dim], and the norm's output.

        Args:
            x, memory: inputs of queries, and of keys and values.
            adapted: True adds low-rank adapters.
        """
        heads, groups = self.num_attention_heads, self.num_gqa_groups or self.num_attention_heads
        init = self.kernel_init or OF_ATTENTION
        root = math.sqrt(self.head_dim) if self.scaled_query_init else 1.0

        def query_init(*args: Any) -> Array:
            return init(*args) / jnp.asarray(root, self.dtype)

        norm: Any = {"enable_layernorm": self.input_layernorm, "epsilon": self.layernorm_epsilon}
        norm |= {"return_layernorm_output": True, "scale_axes": (W_NO_SHARD_AXES,), "ln_bias_axes": (W_NO_SHARD_AXES,)}
        joined = {"kernel_axes": (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), "bias_axes": (W_JOINED_AXES, W_TP_AXES)}
        one = {"kernel_axes": (W_FSDP_AXES, W_TP_AXES), "bias_axes": (W_TP_AXES,)}
        first: Any = partial(part_of, self, LayerNormDenseGeneral, enable_low_rank_adaptation=adapted, **norm)
        plain: Any = partial(part_of, self, DenseGeneral, enable_low_rank_adaptation=adapted)
        width, kv_width = heads * self.head_dim, groups * self.head_dim
        itself = x is memory
        if self.fuse_qkv_params and itself and heads == groups:
            y, normed = first(
                features=(3, width), kernel_init=stacked_init(query_init, init, init), name="qkv", **joined
            )(x)
            parts = [y[..., i, :] for i in range(3)]
        else:
            query, normed = first(features=width, kernel_init=query_init, name="query", **one)(x)
            memory = normed if itself else memory
            if self.fuse_qkv_params:
                y = plain(features=(2, kv_width), kernel_init=stacked_init(init, init), name="kv", **joined)(memory)
                parts = [query, y[..., 0, :], y[..., 1, :]]
            else:
                each = (
                    plain(features=kv_width, kernel_init=init, name=name, **one)(memory) for name in ("key", "value")
                )
                parts = [query, *each]
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in parts)
        return q, k, v, normed

    def _apply_rope(self, x: Array) -> Array:
        """Apply rotary embeddings with periods from the first to the second of the windows."""
        check_name("rotary_pos_emb_group_method", self.rotary_pos_emb_group_method, ("consecutive", "alternate"))
        least, most = self.rotary_pos_emb_windows
        x = x.swapaxes(0, 1) if self.transpose_batch_sequence else x
        interleaved = self.rotary_pos_emb_group_method == "consecutive"
        y = rope(x, jnp.arange(x.shape[1]) / least, theta=most / least, interleaved=interleaved)
        return y.swapaxes(0, 1) if self.transpose_batch_sequence else y


@suggests
class RelativePositionBiases(nn.Module):
    """T5's relative bias [1, heads, queries, keys] from a parameter `rel_embedding` [heads, buckets]."""

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.linear.default_embed_init
    embedding_axes: Axes = ("heads", "relpos_buckets")
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Array:
        shape = self.num_attention_heads, self.num_buckets
        table = parameter(self, "rel_embedding", self.embedding_init, self.embedding_axes, shape)
        return relative_position_bias(
            table, q_seqlen, k_seqlen, max_distance=self.max_distance, bidirectional=bidirectional
        )
