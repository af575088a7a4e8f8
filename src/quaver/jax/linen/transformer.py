"""Attention and Transformer layers for linen: the attention core, multi-head attention, T5's bias, and the whole
layer.
"""

from dataclasses import KW_ONLY
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.blocks.attention import (
    attend,
    count_heads,
    positions_of,
    prepare,
    project,
    projections,
    relative_position_bias,
)
from quaver.jax.blocks.attention_inputs import Mask, Segments
from quaver.jax.blocks.kv_cache import MASK_TYPE, AttentionCache, append, check_cached
from quaver.jax.blocks.layers import drop_path, named, residual
from quaver.jax.blocks.options import (
    AttentionOptions,
    CoreOptions,
    Initializer,
    PartOptions,
    TransformerOptions,
    of_cross_attention,
    of_self_attention,
)
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.linen.dense import dense_of
from quaver.jax.linen.mlp import MLP, NORMS, norm_of
from quaver.options import pick, suggests
from quaver.reference.attention import check_sinks

# ---- attention ----


@suggests
class DotProductAttention(nn.Module, CoreOptions):
    """Module of `quaver.jax.blocks.attention.attention`; dropout uses the rng "dropout".

    Attributes: as the function's arguments, and
        sinks: None, "off_by_one", or "learnable" for a parameter `sinks` [heads].
        alibi: True lowers scores with distance, by slopes 2^(-8 h / heads).
        context_axis: mesh axis of a `jax.shard_map` that shards the tokens, or None; see `ring_attention`.
    """

    @nn.compact
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Mask | None = None,
        bias: Array | None = None,
        *,
        segment_ids: Segments | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        check_sinks(self.sinks)
        key = self.make_rng("dropout") if is_dropping(deterministic, self.dropout) else None
        sinks = self.param("sinks", nn.initializers.zeros, (q.shape[2],)) if self.sinks == "learnable" else None
        arguments = {"mask": mask, "bias": bias, "segment_ids": segment_ids, "positions": positions}
        return attend(self, q, k, v, sinks=sinks, dropout_key=key, **arguments)


def is_dropping(deterministic: bool | None, *rates: float) -> bool:
    """Return True if dropout is active.

    Raises:
        ValueError: a rate is not 0 and `deterministic` is not set.
    """
    if not any(rates):
        return False
    if deterministic is None:
        raise ValueError("there is dropout; say deterministic=False in training, with rngs={'dropout': key}, or True")
    return not deterministic


@suggests
class MultiHeadAttention(nn.Module, AttentionOptions):
    """Multi-head attention: projections, rope and norms of queries and keys, attention, and output projection.

    Attributes:
        heads: number of query heads.
        groups: number of key/value heads, each shared by heads / groups query heads; None for one per query head.
        head_dim: features of a head; None divides the input's by the heads.
        out: features of the output; None uses the input's.
        fused: True for one projection `qkv` (with a memory: `query` and `kv`); False for `query`, `key` and `value`.
        rope: options of the rotary embedding, or None.
        qk_norm: "RMSNorm" or "LayerNorm" over each head's features of queries and keys, or None.
        qk_norm_after_rope: apply these norms after rope.
        mask_type, window, chunk, scale, soft_cap, sinks, alibi, dropout, context_axis: as for
            `DotProductAttention`.
        partition: name the kernels' axes "embed", "heads" and "head_dim", for flax's logical sharding rules.
        others: those of DenseGeneral.
    """

    heads: int
    _: KW_ONLY
    out: int | None = None

    @nn.compact
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Array | None = None,
        segment_ids: Segments | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
        deterministic: bool | None = None,
        decode: bool = False,
    ) -> Array:
        """Attend from x [B, S, d] to memory [B, Sm, dm], or to itself.

        Args:
            x: [B, S, d].
            memory: [B, Sm, dm], or None for self-attention.
            mask, bias, segment_ids: as for `quaver.jax.blocks.attention.attention`.
            positions, offset: as for `quaver.jax.blocks.attention.rope`, for both queries and keys.
            deterministic: False applies dropout, with the rng "dropout".
            decode: True attends to the tokens in the collection "cache" too, and appends x to it; pass
                mutable=["cache"]. `init` with decode=True makes a cache as long as its x.
        Returns:
            [B, S, out].
        """
        heads, groups, dim = count_heads(x.shape[-1], self.heads, self.groups, self.head_dim)
        matrices = projections(heads, groups, dim, self.fused, memory is not None)
        parts = {name: dense_of(self, name, matrix) for name, matrix in matrices.items()}
        positions = positions_of(self.context_axis, positions, x.shape[1])
        q, k, v = project(x, memory, parts, heads // groups)
        core: dict[str, Any] = pick(CoreOptions, self)
        cache = None
        if decode:
            check_cached(self, memory=memory, mask=mask, segment_ids=segment_ids)
            cache = self._cache(k.shape, k.dtype)
        if cache is not None:
            offset = offset + cache[2].value
        q, k = (
            prepare(a, self._norm(f"{name}_norm"), self.rope, positions, offset, self.qk_norm_after_rope)
            for name, a in (("query", q), ("key", k))
        )
        if cache is not None:
            new, mask = append(AttentionCache(*(variable.value for variable in cache)), k, v)
            for variable, value in zip(cache, new, strict=True):
                variable.value = value
            k, v = new.keys.astype(k.dtype), new.values.astype(v.dtype)
            core["mask_type"] = MASK_TYPE
        attention = DotProductAttention(**core, name="attention")
        y = attention(q, k, v, mask, bias, segment_ids=segment_ids, positions=positions, deterministic=deterministic)
        return dense_of(self, "out", KernelMatrix((self.out or x.shape[-1],), ("heads", "head_dim", "embed")))(y)

    def _cache(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[Any] | None:
        """Return the variables of `AttentionCache`; None in the `init` that makes them."""
        exists = self.has_variable("cache", "cached_key")
        if not exists and not self.is_initializing():
            raise ValueError("decode=True needs the collection 'cache'; make it by init(key, x, decode=True)")
        of_buffers = [self.variable("cache", name, jnp.zeros, shape, dtype) for name in ("cached_key", "cached_value")]
        length = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        return [*of_buffers, length] if exists else None

    def _norm(self, name: str) -> nn.Module | None:
        return None if self.qk_norm is None else named(self.qk_norm, NORMS)(param_dtype=self.param_dtype, name=name)


@suggests
class RelativePositionBias(nn.Module):
    """T5's bias for `attention`, with a parameter `table` [heads, buckets] that layers may share.

    Attributes: as the arguments of `quaver.jax.blocks.attention.relative_position_bias`.
    """

    heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    param_dtype: DTypeLike = jnp.float32
    table_init: Initializer = nn.initializers.normal(1.0)

    @nn.compact
    def __call__(self, queries: int, keys: int) -> Array:
        table = self.param("table", self.table_init, (self.heads, self.buckets), self.param_dtype)
        return relative_position_bias(
            table, queries, keys, max_distance=self.max_distance, bidirectional=self.bidirectional
        )


# ---- Transformer layer ----


@suggests
class TransformerLayer(nn.Module, TransformerOptions):
    """Transformer layer: encoder (mask_type "none" or "padding"), decoder-only ("causal"), or decoder with cross
    attention.

    Attributes:
        heads, hidden: number of query heads, and hidden features of the MLP.
        cross_attention: True adds attention to a memory between attention and MLP.
        mask_type, cross_mask_type: mask types of the two attentions.
        normalization: "LayerNorm" or "RMSNorm"; with eps and zero_centered.
        post_norm: True normalizes after adding, False before each part; see `residual`.
        parallel: attention and MLP read the same normalized input, and both outputs are added.
        dropout: of each part's output.
        attention_dropout: of the attention probabilities.
        drop_path: probability of dropping a part's output for a sample.
        others: those of MultiHeadAttention and MLP. Submodules: `attention`, `cross_attention`, `mlp`, and
            `attention_norm`, `cross_attention_norm`, `mlp_norm` (parallel: only `norm`).
    """

    heads: int
    hidden: int
    _: KW_ONLY
    cross_attention: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        bias: Array | None = None,
        segment_ids: Segments | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
        deterministic: bool | None = None,
        decode: bool = False,
    ) -> Array:
        """Run the layer on x [B, S, d]; returns the same shape.

        Args:
            x: [B, S, d].
            memory: [B, Sm, dm], what cross attention attends to.
            mask, bias, segment_ids, positions, offset: of the self attention.
            memory_mask: mask of the cross attention.
            deterministic: False applies dropout and drop path, with the rng "dropout".
            decode: as for MultiHeadAttention, of the self attention.
        Raises:
            ValueError: a memory is missing or unexpected, or a part rejects its arguments.
        """
        if self.cross_attention is (memory is None):
            raise ValueError(
                "TransformerLayer with cross_attention=True needs a memory"
                if self.cross_attention
                else "TransformerLayer has no cross attention; make it with cross_attention=True or give no memory"
            )
        if self.parallel and (self.post_norm or self.cross_attention):
            raise ValueError("a parallel TransformerLayer is pre-norm and has no cross attention")

        def drop(y: Array) -> Array:
            if is_dropping(deterministic, self.dropout):
                y = nn.Dropout(self.dropout, deterministic=False)(y)
            if is_dropping(deterministic, self.drop_path):
                y = drop_path(y, self.drop_path, self.make_rng("dropout"))
            return y

        attend = MultiHeadAttention(self.heads, **of_self_attention(self), name="attention")
        options: dict[str, Any] = {"mask": mask, "bias": bias, "segment_ids": segment_ids, "positions": positions}
        parts = {"attention": lambda h: attend(h, offset=offset, deterministic=deterministic, decode=decode, **options)}
        if self.cross_attention:
            cross = MultiHeadAttention(self.heads, **of_cross_attention(self), name="cross_attention")
            parts["cross_attention"] = lambda h: cross(h, memory, mask=memory_mask, deterministic=deterministic)
        parts["mlp"] = MLP(self.hidden, self.activation, **pick(PartOptions, self), name="mlp")
        norms = [norm_of(self, name) for name in (["norm"] if self.parallel else [f"{part}_norm" for part in parts])]
        return residual(x, list(parts.values()), norms, drop, post_norm=self.post_norm, parallel=self.parallel)
