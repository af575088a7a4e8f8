"""Attention and Transformer layers for NNX: the attention core, multi-head attention, T5's bias, and the whole
layer.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
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
from quaver.jax.blocks.kv_cache import MASK_TYPE, AttentionCache, append, check_cached, init_cache
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
from quaver.jax.nnx.dense import Parameters, dense_of, of_part
from quaver.jax.nnx.mlp import MLP, NORMS, norm_of
from quaver.options import pick, takes
from quaver.reference.attention import check_sinks

# ---- cache ----


class KVCache(nnx.Module):
    """Key/value cache of one attention layer, which each call of the layer appends to.

    Args:
        batch, length: number of sequences, and of tokens that fit in each.
        groups, head_dim: heads of keys and values, and features of a head.
        dtype: of the buffers; the layer's is exact.
    """

    def __init__(self, batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike = jnp.float32) -> None:
        empty = init_cache(batch, length, groups, head_dim, dtype)
        self.keys, self.values, self.length = (nnx.Cache(x) for x in empty)

    def append(self, k: Array, v: Array) -> tuple[Array, Array, Mask]:
        """Return all keys and values and the padding mask; see `quaver.jax.blocks.kv_cache.append`."""
        variables = self.keys, self.values, self.length
        new, mask = append(AttentionCache(*(variable[...] for variable in variables)), k, v)
        for variable, value in zip(variables, new, strict=True):
            variable[...] = value
        return new.keys.astype(k.dtype), new.values.astype(v.dtype), mask


# ---- attention ----


@dataclass(kw_only=True)
class CoreArguments(CoreOptions):
    """Constructor arguments of `DotProductAttention`; see there."""

    heads: int | None = None
    rngs: nnx.Rngs | None = None


class DotProductAttention(nnx.Module):
    """Module of `quaver.jax.blocks.attention.attention`; `train()` and `eval()` switch its dropout.

    Args: as for the function, and
        sinks: None, "off_by_one", or "learnable" for a parameter `sinks` [heads].
        alibi: True lowers scores with distance, by slopes 2^(-8 h / heads).
        context_axis: mesh axis of a `jax.shard_map` that shards the tokens, or None; see `ring_attention`.
        heads: number of query heads, only needed with learnable sinks.
        rngs: only needed with dropout; its stream "dropout" is used.
    """

    @takes(CoreArguments)
    def __init__(self, options: CoreArguments) -> None:
        for name, value in pick(CoreOptions, options).items():
            if not (name == "sinks" and value == "learnable"):
                setattr(self, name, value)
        check_sinks(options.sinks)
        if options.sinks == "learnable":
            if options.heads is None:
                raise ValueError("learnable sinks are one number per head; give heads, the number of query heads")
            self.sinks: Any = nnx.Param(jnp.zeros(options.heads))
        self.deterministic = False
        self.rngs = dropout_stream(options.rngs, options.dropout)

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
        cache: KVCache | None = None,
    ) -> Array:
        own_type: dict[str, Any] = {}
        if cache is not None:
            check_cached(self, mask=mask, segment_ids=segment_ids)
            k, v, mask = cache.append(k, v)
            own_type["mask_type"] = MASK_TYPE
        key = None if self.rngs is None or self.deterministic else self.rngs()
        sinks = self.sinks[...] if isinstance(self.sinks, nnx.Variable) else None
        arguments = {"mask": mask, "bias": bias, "segment_ids": segment_ids, "positions": positions}
        return attend(self, q, k, v, sinks=sinks, dropout_key=key, **arguments, **own_type)


def dropout_stream(rngs: nnx.Rngs | None, *rates: float) -> Any:
    """Return a forked random stream for a module's dropout; None if all rates are 0.

    Raises:
        ValueError: there is dropout but no rngs.
    """
    if not any(rates):
        return nnx.data(None)
    if rngs is None:
        raise ValueError("there is dropout; give rngs=nnx.Rngs(seed) to draw from")
    return rngs.dropout.fork()


@dataclass
class AttentionArguments(AttentionOptions, Parameters):
    """Constructor arguments of `MultiHeadAttention`; see there."""

    in_features: int
    heads: int
    _: KW_ONLY
    out: int | None = None
    memory_features: int | None = None


class MultiHeadAttention(nnx.Module):
    """Multi-head attention: projections, rope and norms of queries and keys, attention, and output projection.

    Args:
        in_features: features of the input.
        heads: number of query heads.
        groups: number of key/value heads, each shared by heads / groups query heads; None for one per query head.
        head_dim: features of a head; None divides the input's by the heads.
        out: features of the output; None uses the input's.
        memory_features: features of the memory for keys and values; None for self-attention.
        fused: True for one projection `qkv` (with a memory: `query` and `kv`); False for `query`, `key` and `value`.
        rope: options of the rotary embedding, or None.
        qk_norm: "RMSNorm" or "LayerNorm" over each head's features of queries and keys, or None.
        qk_norm_after_rope: apply these norms after rope.
        mask_type, window, chunk, scale, soft_cap, sinks, alibi, dropout, context_axis: as for
            `DotProductAttention`.
        partition: name the kernels' axes "embed", "heads" and "head_dim", for nnx.logical_axis_rules.
        others: those of DenseGeneral.
    """

    @takes(AttentionArguments)
    def __init__(self, options: AttentionArguments) -> None:
        inputs, memory = options.in_features, options.memory_features
        heads, groups, dim = count_heads(inputs, options.heads, options.groups, options.head_dim)
        self.attends_to_itself = memory is None
        self.shared = heads // groups
        self.fused = options.fused
        for name, matrix in projections(heads, groups, dim, self.fused, memory is not None).items():
            features = inputs if memory is None or name == "query" else memory
            setattr(self, name, dense_of(options, name, features, matrix))
        self.query_norm = self.key_norm = nnx.data(None)
        if options.qk_norm is not None:
            norm = named(options.qk_norm, NORMS)
            self.query_norm = norm(dim, param_dtype=options.param_dtype)
            self.key_norm = norm(dim, param_dtype=options.param_dtype)
        self.qk_norm_after_rope = options.qk_norm_after_rope
        self.rope = options.rope
        self.context_axis = options.context_axis
        self.attention = DotProductAttention(**pick(CoreArguments, options))
        out = KernelMatrix((options.out or inputs,), ("heads", "head_dim", "embed"))
        self.out = dense_of(options, "out", (heads, dim), out)

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
        cache: KVCache | None = None,
    ) -> Array:
        """Attend from x [B, S, d] to memory [B, Sm, dm], or to itself.

        Args:
            x: [B, S, d].
            memory: [B, Sm, dm], or None for self-attention.
            mask, bias, segment_ids: as for `quaver.jax.blocks.attention.attention`.
            positions, offset: as for `quaver.jax.blocks.attention.rope`, for both queries and keys.
            cache: tokens before x, which x is appended to; only causal self-attention.
        Returns:
            [B, S, out].
        """
        if self.attends_to_itself is not (memory is None):
            raise ValueError(
                "this MultiHeadAttention attends to itself; make it with memory_features to give it a memory"
                if self.attends_to_itself
                else "this MultiHeadAttention was made with memory_features; give it a memory"
            )
        if cache is not None:
            check_cached(self.attention, memory=memory)
            offset = offset + cache.length[...]
        positions = positions_of(self.context_axis, positions, x.shape[1])
        q, k, v = project(x, memory, vars(self), self.shared)
        q, k = (
            prepare(a, norm, self.rope, positions, offset, self.qk_norm_after_rope)
            for a, norm in ((q, self.query_norm), (k, self.key_norm))
        )
        return self.out(self.attention(q, k, v, mask, bias, segment_ids=segment_ids, positions=positions, cache=cache))


class RelativePositionBias(nnx.Module):
    """T5's bias for `attention`, with a parameter `table` [heads, buckets] that layers may share.

    Args: as for `quaver.jax.blocks.attention.relative_position_bias`.
    """

    def __init__(
        self,
        heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        param_dtype: DTypeLike = jnp.float32,
        table_init: Initializer = nnx.initializers.normal(1.0),  # noqa: B008
        rngs: nnx.Rngs,
    ) -> None:
        self.table = nnx.Param(table_init(rngs.params(), (heads, buckets), param_dtype))
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def __call__(self, queries: int, keys: int) -> Array:
        return relative_position_bias(
            self.table[...], queries, keys, max_distance=self.max_distance, bidirectional=self.bidirectional
        )


# ---- Transformer layer ----


@dataclass
class TransformerArguments(TransformerOptions, Parameters):
    """Constructor arguments of `TransformerLayer`; see there."""

    features: int
    heads: int
    hidden: int
    _: KW_ONLY
    memory_features: int | None = None


class TransformerLayer(nnx.Module):
    """Transformer layer: encoder (mask_type "none" or "padding"), decoder-only ("causal"), or decoder with cross
    attention.

    Args:
        features: features of the residual stream.
        heads, hidden: number of query heads, and hidden features of the MLP.
        memory_features: features of a memory, which adds cross attention between attention and MLP; None for none.
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

    @takes(TransformerArguments)
    def __init__(self, options: TransformerArguments) -> None:
        features, memory = options.features, options.memory_features
        if options.parallel and (options.post_norm or memory is not None):
            raise ValueError("a parallel TransformerLayer is pre-norm and has no cross attention")
        self.attention = MultiHeadAttention(
            features, options.heads, **of_self_attention(options) | of_part(options, "attention")
        )
        self.cross_attention = nnx.data(None)
        if memory is not None:
            cross_options = of_cross_attention(options) | of_part(options, "cross_attention")
            self.cross_attention = MultiHeadAttention(features, options.heads, memory_features=memory, **cross_options)
        mlp_options = pick(PartOptions, options) | of_part(options, "mlp")
        self.mlp = MLP(features, options.hidden, activation=options.activation, **mlp_options)
        if options.parallel:
            self.norm = norm_of(options, features)
        else:
            self.attention_norm = norm_of(options, features)
            self.cross_attention_norm = nnx.data(None if memory is None else norm_of(options, features))
            self.mlp_norm = norm_of(options, features)
        self.post_norm = options.post_norm
        self.parallel = options.parallel
        self.drop_path = options.drop_path
        self.drop = nnx.Dropout(options.dropout, rngs=options.rngs if options.dropout else None)
        self.deterministic = False
        self.rngs = dropout_stream(options.rngs, options.drop_path)

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
        cache: KVCache | None = None,
    ) -> Array:
        """Run the layer on x [B, S, d]; returns the same shape.

        Args:
            x: [B, S, d].
            memory: [B, Sm, dm], what cross attention attends to.
            mask, bias, segment_ids, positions, offset, cache: of the self attention.
            memory_mask: mask of the cross attention.
        Raises:
            ValueError: a memory is missing or unexpected, or a part rejects its arguments.
        """
        cross = self.cross_attention
        if (cross is None) is not (memory is None):
            raise ValueError(
                "TransformerLayer has no cross attention; make it with memory_features or give no memory"
                if cross is None
                else "TransformerLayer needs a memory"
            )

        arguments: Any = {
            "mask": mask,
            "bias": bias,
            "segment_ids": segment_ids,
            "positions": positions,
            "cache": cache,
        }
        parts: list[Any] = [lambda h: self.attention(h, offset=offset, **arguments), self.mlp]
        norms = [self.norm] if self.parallel else [self.attention_norm, self.mlp_norm]
        if cross is not None:
            parts.insert(1, lambda h: cross(h, memory, mask=memory_mask))
            norms.insert(1, self.cross_attention_norm)
        return residual(x, parts, norms, self._drop, post_norm=self.post_norm, parallel=self.parallel)

    def _drop(self, y: Array) -> Array:
        y = self.drop(y)
        if self.rngs is None or self.deterministic:
            return y
        return drop_path(y, self.drop_path, self.rngs())
