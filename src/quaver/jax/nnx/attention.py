"""Attention modules: the core without parameters, the projections around it, and T5's bias."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.attention import Mask, attention
from quaver.jax.heads import Rope, count_heads, split_fused, turn
from quaver.jax.nnx.dense import DenseGeneral, Initializer
from quaver.jax.nnx.norm import make_norm
from quaver.jax.nnx.variable import joined
from quaver.jax.position import relative_position_bias


class DotProductAttention(nnx.Module):
    """`quaver.jax.attention.attention` as a module without parameters; `train()` and `eval()` switch its dropout.

    Args: as the function's; rngs, whose stream "dropout" is drawn from, is needed with dropout alone.
    """

    def __init__(
        self,
        *,
        mask_type: str = "none",
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
        recipe: str | Recipe | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.mask_type = mask_type
        self.window = window
        self.scale = scale
        self.soft_cap = soft_cap
        self.dropout = dropout
        self.recipe = recipe
        self.deterministic = False
        self.rngs = dropout_stream(rngs, dropout)

    def __call__(self, q: Array, k: Array, v: Array, mask: Mask | None = None, bias: Array | None = None) -> Array:
        dropping = self.rngs is not None and not self.deterministic
        return attention(
            q,
            k,
            v,
            mask_type=self.mask_type,
            mask=mask,
            window=self.window,
            bias=bias,
            scale=self.scale,
            soft_cap=self.soft_cap,
            dropout=self.dropout if dropping else 0.0,
            dropout_key=self.rngs() if dropping else None,
            recipe=self.recipe,
        )


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
        mask_type, window, scale, soft_cap, dropout: of `quaver.jax.attention.attention`.
        partition: name the kernels' axes "embed", "heads" and "head_dim", for nnx.logical_axis_rules.
        options: DenseGeneral's.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        *,
        groups: int | None = None,
        head_dim: int | None = None,
        out: int | None = None,
        memory_features: int | None = None,
        fused: bool = True,
        rope: Rope | None = None,
        qk_norm: str | None = None,
        qk_norm_after_rope: bool = False,
        mask_type: str = "none",
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        dropout: float = 0.0,
        partition: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        name: str = "",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        heads, groups, dim = count_heads(in_features, heads, groups, head_dim)

        def project(part: str, inputs: Any, features: Any, *axes: str | None) -> DenseGeneral:
            rows = 1 if isinstance(inputs, int) else len(inputs)
            return DenseGeneral(
                inputs,
                features,
                kernel_axes=axes if partition else (),
                bias_axes=axes[rows:] if partition else (),
                param_dtype=param_dtype,
                name=joined(name, part),
                rngs=rngs,
                **options,
            )

        of_heads = ("embed", "heads", "head_dim")
        of_groups = ("embed", "heads", None, "head_dim")
        memory = in_features if memory_features is None else memory_features
        self.attends_to_itself = memory_features is None
        self.shared = heads // groups
        self.fused = fused
        if fused and memory_features is None:
            self.qkv = project("qkv", in_features, (groups, self.shared + 2, dim), *of_groups)
        else:
            self.query = project("query", in_features, (heads, dim), *of_heads)
            if fused:
                self.kv = project("kv", memory, (groups, 2, dim), *of_groups)
            else:
                self.key = project("key", memory, (groups, dim), *of_heads)
                self.value = project("value", memory, (groups, dim), *of_heads)
        self.query_norm = self.key_norm = nnx.data(None)
        if qk_norm is not None:
            self.query_norm = make_norm(qk_norm, dim, param_dtype=param_dtype)
            self.key_norm = make_norm(qk_norm, dim, param_dtype=param_dtype)
        self.qk_norm_after_rope = qk_norm_after_rope
        self.rope = rope
        self.attention = DotProductAttention(
            mask_type=mask_type,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            dropout=dropout,
            recipe=options.get("recipe"),
            rngs=rngs,
        )
        self.out = project("out", (heads, dim), out or in_features, "heads", "head_dim", "embed")

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
            mask, bias: of `quaver.jax.attention.attention`.
            positions, offset: of `quaver.jax.rope.rope`, for queries and keys alike.
        Returns:
            [B, S, out].
        """
        if self.attends_to_itself is not (memory is None):
            raise ValueError(
                "this MultiHeadAttention attends to itself; make it with memory_features to give it a memory"
                if self.attends_to_itself
                else "this MultiHeadAttention was made with memory_features; give it a memory"
            )
        q, k, v = self._project(x, memory)
        q = self._prepare(q, self.query_norm, positions, offset)
        k = self._prepare(k, self.key_norm, positions, offset)
        return self.out(self.attention(q, k, v, mask, bias))

    def _project(self, x: Array, memory: Array | None) -> tuple[Array, Array, Array]:
        if self.fused and memory is None:
            q, k, v = split_fused(self.qkv(x), self.shared, 1, 1)
            return q, k, v
        memory = x if memory is None else memory
        if self.fused:
            k, v = split_fused(self.kv(memory), 1, 1)
            return self.query(x), k, v
        return self.query(x), self.key(memory), self.value(memory)

    def _prepare(self, x: Array, norm: Any, positions: Array | None, offset: int | Array) -> Array:
        if norm is not None and self.qk_norm_after_rope:
            return norm(turn(x, self.rope, positions, offset))
        return turn(x if norm is None else norm(x), self.rope, positions, offset)


class RelativePositionBias(nnx.Module):
    """T5's bias for `attention`: a parameter `table` [heads, buckets], shared by the layers that it is handed to.

    Args: as those of `quaver.jax.position.relative_position_bias`.
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
