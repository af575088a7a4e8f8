"""Attention modules: the core without parameters, the projections around it, and T5's bias."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.core.options import pick, takes
from quaver.jax.blocks.attention.dot_product import Mask
from quaver.jax.blocks.attention.heads import attend, count_heads, prepare, project, projections
from quaver.jax.blocks.attention.position import relative_position_bias
from quaver.jax.blocks.norm import named
from quaver.jax.blocks.options import AttentionOptions, CoreOptions, Initializer
from quaver.jax.linears.general import Matrix
from quaver.jax.nnx.dense import Parameters, dense_of
from quaver.jax.nnx.norm import NORMS


@dataclass(kw_only=True)
class CoreArguments(CoreOptions):
    """The arguments of `DotProductAttention`."""

    rngs: nnx.Rngs | None = None


class DotProductAttention(nnx.Module):
    """`quaver.jax.blocks.attention.dot_product.attention` as a module without parameters; `train()` and `eval()` switch
    its dropout.

    Args: as the function's; rngs, whose stream "dropout" is drawn from, is needed with dropout alone.
    """

    @takes(CoreArguments)
    def __init__(self, options: CoreArguments) -> None:
        for name, value in pick(CoreOptions, options).items():
            setattr(self, name, value)
        self.deterministic = False
        self.rngs = dropout_stream(options.rngs, options.dropout)

    def __call__(self, q: Array, k: Array, v: Array, mask: Mask | None = None, bias: Array | None = None) -> Array:
        key = None if self.rngs is None or self.deterministic else self.rngs()
        return attend(self, q, k, v, mask, bias, key)


def dropout_stream(rngs: nnx.Rngs | None, *rates: float) -> Any:
    """The stream that a module drops from, of its own; None where nothing is dropped.

    Raises:
        ValueError: there is dropout and there are no rngs.
    """
    if not any(rates):
        return nnx.data(None)
    if rngs is None:
        raise ValueError("there is dropout; give rngs=nnx.Rngs(seed) to draw from")
    return rngs.dropout.fork()


@dataclass
class AttentionArguments(AttentionOptions, Parameters):
    """The arguments of `MultiHeadAttention`, which says what they are."""

    in_features: int
    heads: int
    _: KW_ONLY
    out: int | None = None
    memory_features: int | None = None


class MultiHeadAttention(nnx.Module):
    """Projections, rotary positions and norms of queries and keys, attention, and the projection out.

    Args:
        in_features: of the input.
        heads: of the queries.
        groups: heads of keys and values, each shared by heads / groups query heads; None gives each its own.
        head_dim: features of a head; None divides the input's among the heads.
        out: features of the output; None keeps the input's.
        memory_features: of the memory that the keys and values come from; None attends to the input itself.
        fused: one projection `qkv` (with a memory: `query` and `kv`); else `query`, `key` and `value`.
        rope: options of rotary positions; None has none.
        qk_norm: "RMSNorm" or "LayerNorm" over each head's features of queries and keys; None has none.
        qk_norm_after_rope: turn first.
        mask_type, window, scale, soft_cap, dropout: of `quaver.jax.blocks.attention.dot_product.attention`.
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
        self.attention = DotProductAttention(**pick(CoreArguments, options))
        out = Matrix((options.out or inputs,), ("heads", "head_dim", "embed"))
        self.out = dense_of(options, "out", (heads, dim), out)

    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Array | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
    ) -> Array:
        """Attend from x [B, S, d] to memory [B, Sm, dm], or to itself.

        Args:
            mask, bias: of `quaver.jax.blocks.attention.dot_product.attention`.
            positions, offset: of `quaver.jax.blocks.attention.rotary.rope`, for queries and keys alike.
        Returns:
            [B, S, out].
        """
        if self.attends_to_itself is not (memory is None):
            raise ValueError(
                "this MultiHeadAttention attends to itself; make it with memory_features to give it a memory"
                if self.attends_to_itself
                else "this MultiHeadAttention was made with memory_features; give it a memory"
            )
        q, k, v = project(x, memory, vars(self), self.shared)
        q, k = (
            prepare(a, norm, self.rope, positions, offset, self.qk_norm_after_rope)
            for a, norm in ((q, self.query_norm), (k, self.key_norm))
        )
        return self.out(self.attention(q, k, v, mask, bias))


class RelativePositionBias(nnx.Module):
    """T5's bias for `attention`: a parameter `table` [heads, buckets], shared by the layers that it is handed to.

    Args: as those of `quaver.jax.blocks.attention.position.relative_position_bias`.
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
