"""Attention modules: the core without parameters, the projections around it, and T5's bias."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.attention import Mask, attention
from quaver.jax.heads import Rope, count_heads, split_fused, turn
from quaver.jax.linen.dense import DenseGeneral, Initializer
from quaver.jax.linen.norm import make_norm
from quaver.jax.position import relative_position_bias


class DotProductAttention(nn.Module):
    """`quaver.jax.attention.attention` as a module; it has no parameters and draws from the rng "dropout".

    Attributes: as the function's arguments.
    """

    mask_type: str = "none"
    window: tuple[int, int] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    recipe: str | Recipe | None = None

    @nn.compact
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Mask | None = None,
        bias: Array | None = None,
        *,
        deterministic: bool | None = None,
    ) -> Array:
        dropping = is_dropping(deterministic, self.dropout)
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
            dropout_key=self.make_rng("dropout") if dropping else None,
            recipe=self.recipe,
        )


def is_dropping(deterministic: bool | None, *rates: float) -> bool:
    """True if dropout acts.

    Raises:
        ValueError: a rate is not 0, and neither the module nor the call says whether this is training.
    """
    if not any(rates):
        return False
    if deterministic is None:
        raise ValueError("there is dropout; say deterministic=False in training, with rngs={'dropout': key}, or True")
    return not deterministic


class MultiHeadAttention(nn.Module):
    """Projections, rotary positions and norms of queries and keys, attention, and the projection out.

    Attributes:
        heads: of the queries.
        groups: heads of keys and values, each shared by heads / groups query heads; None gives each its own.
        head_dim: features of a head; None divides the input's among the heads.
        out: features of the output; None keeps the input's.
        fused: one projection `qkv` (with a memory: `query` and `kv`); else `query`, `key` and `value`.
        rope: options of rotary positions; None has none.
        qk_norm: "RMSNorm" or "LayerNorm" over each head's features of queries and keys; None has none.
        qk_norm_after_rope: turn first.
        mask_type, window, scale, soft_cap, dropout: of `quaver.jax.attention.attention`.
        partition: name the kernels' axes "embed", "heads" and "head_dim", for flax's logical sharding rules.
        The others are DenseGeneral's.
    """

    heads: int
    groups: int | None = None
    head_dim: int | None = None
    out: int | None = None
    fused: bool = True
    rope: Rope | None = None
    qk_norm: str | None = None
    qk_norm_after_rope: bool = False
    mask_type: str = "none"
    window: tuple[int, int] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    partition: bool = False
    recipe: str | Recipe | None = None
    seed: int = 0

    @nn.compact
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Mask | None = None,
        bias: Array | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
        deterministic: bool | None = None,
    ) -> Array:
        """Attend from x [B, S, d] to memory [B, Sm, dm], or to itself.

        Args:
            mask, bias: of `quaver.jax.attention.attention`.
            positions, offset: of `quaver.jax.rope.rope`, for queries and keys alike.
            deterministic: False applies dropout, with the rng "dropout".
        Returns:
            [B, S, out].
        """
        heads, groups, dim = count_heads(x.shape[-1], self.heads, self.groups, self.head_dim)
        q, k, v = self._project(x, memory, heads, groups, dim)
        q, k = self._prepare(q, "query_norm", positions, offset), self._prepare(k, "key_norm", positions, offset)
        core = DotProductAttention(
            self.mask_type, self.window, self.scale, self.soft_cap, self.dropout, self.recipe, name="attention"
        )
        y = core(q, k, v, mask, bias, deterministic=deterministic)
        return self._dense(self.out or x.shape[-1], "out", ("heads", "head_dim", "embed"), axis=(-2, -1))(y)

    def _project(self, x: Array, memory: Array | None, heads: int, groups: int, dim: int) -> tuple[Array, Array, Array]:
        shared = heads // groups
        of_heads = ("embed", "heads", "head_dim")
        of_groups = ("embed", "heads", None, "head_dim")
        if self.fused and memory is None:
            qkv = self._dense((groups, shared + 2, dim), "qkv", of_groups)(x)
            q, k, v = split_fused(qkv, shared, 1, 1)
            return q, k, v
        q = self._dense((heads, dim), "query", of_heads)(x)
        memory = x if memory is None else memory
        if self.fused:
            k, v = split_fused(self._dense((groups, 2, dim), "kv", of_groups)(memory), 1, 1)
            return q, k, v
        k, v = (self._dense((groups, dim), name, of_heads)(memory) for name in ("key", "value"))
        return q, k, v

    def _prepare(self, x: Array, norm: str, positions: Array | None, offset: int | Array) -> Array:
        if self.qk_norm is None:
            return turn(x, self.rope, positions, offset)
        normalize = make_norm(self.qk_norm, param_dtype=self.param_dtype, name=norm)
        if self.qk_norm_after_rope:
            return normalize(turn(x, self.rope, positions, offset))
        return turn(normalize(x), self.rope, positions, offset)

    def _dense(self, features: Any, name: str, axes: tuple[str | None, ...], axis: Any = -1) -> DenseGeneral:
        contracted = 1 if axis == -1 else len(axis)
        return DenseGeneral(
            features,
            axis=axis,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=axes if self.partition else (),
            bias_axes=axes[contracted:] if self.partition else (),
            recipe=self.recipe,
            seed=self.seed,
            name=name,
        )


class RelativePositionBias(nn.Module):
    """T5's bias for `attention`: a parameter `table` [heads, buckets], shared by the layers that it is handed to.

    Attributes: as the arguments of `quaver.jax.position.relative_position_bias`.
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
