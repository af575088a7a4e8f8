"""Attention modules: the core without parameters, the projections around it, and T5's bias."""

from dataclasses import KW_ONLY

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.core.options import pick, suggests
from quaver.jax.blocks.attention.dot_product import Mask
from quaver.jax.blocks.attention.heads import attend, count_heads, prepare, project, projections
from quaver.jax.blocks.attention.position import relative_position_bias
from quaver.jax.blocks.norm import named
from quaver.jax.blocks.options import AttentionOptions, CoreOptions, Initializer
from quaver.jax.linears.general import Matrix
from quaver.jax.linen.dense import dense_of
from quaver.jax.linen.norm import NORMS


@suggests
class DotProductAttention(nn.Module, CoreOptions):
    """`quaver.jax.blocks.attention.dot_product.attention` as a module without parameters; it draws from the rng
    "dropout".

    Attributes: as the function's arguments.
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
        deterministic: bool | None = None,
    ) -> Array:
        key = self.make_rng("dropout") if is_dropping(deterministic, self.dropout) else None
        return attend(self, q, k, v, mask, bias, key)


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


@suggests
class MultiHeadAttention(nn.Module, AttentionOptions):
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
        mask_type, window, scale, soft_cap, dropout: of `quaver.jax.blocks.attention.dot_product.attention`.
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
        positions: Array | None = None,
        offset: int | Array = 0,
        deterministic: bool | None = None,
    ) -> Array:
        """Attend from x [B, S, d] to memory [B, Sm, dm], or to itself.

        Args:
            mask, bias: of `quaver.jax.blocks.attention.dot_product.attention`.
            positions, offset: of `quaver.jax.blocks.attention.rotary.rope`, for queries and keys alike.
            deterministic: False applies dropout, with the rng "dropout".
        Returns:
            [B, S, out].
        """
        heads, groups, dim = count_heads(x.shape[-1], self.heads, self.groups, self.head_dim)
        matrices = projections(heads, groups, dim, self.fused, memory is not None)
        parts = {name: dense_of(self, name, matrix) for name, matrix in matrices.items()}
        q, k, v = project(x, memory, parts, heads // groups)
        q, k = (
            prepare(a, self._norm(f"{name}_norm"), self.rope, positions, offset, self.qk_norm_after_rope)
            for name, a in (("query", q), ("key", k))
        )
        core = DotProductAttention(**pick(CoreOptions, self), name="attention")
        y = core(q, k, v, mask, bias, deterministic=deterministic)
        return dense_of(self, "out", Matrix((self.out or x.shape[-1],), ("heads", "head_dim", "embed")))(y)

    def _norm(self, name: str) -> nn.Module | None:
        return None if self.qk_norm is None else named(self.qk_norm, NORMS)(param_dtype=self.param_dtype, name=name)


@suggests
class RelativePositionBias(nn.Module):
    """T5's bias for `attention`: a parameter `table` [heads, buckets], shared by the layers that it is handed to.

    Attributes: as the arguments of `quaver.jax.blocks.attention.position.relative_position_bias`.
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
