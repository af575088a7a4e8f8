"""A whole layer: attention, perhaps attention to a memory, and an MLP, around the residual stream."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.attention import Mask
from quaver.jax.heads import Rope
from quaver.jax.nnx.attention import MultiHeadAttention, dropout_stream
from quaver.jax.nnx.mlp import MLP
from quaver.jax.nnx.norm import make_norm
from quaver.jax.nnx.variable import joined
from quaver.jax.residual import drop_path, residual


class TransformerLayer(nnx.Module):
    """Encoder (mask_type "none" or "padding"), decoder-only ("causal"), or decoder with cross attention.

    Args:
        features: of the residual stream.
        heads, hidden: query heads, and features inside the MLP.
        memory_features: of a memory to attend to as well, between attention and MLP; None has no cross attention.
        mask_type, cross_mask_type: of the two attentions.
        normalization: "LayerNorm" or "RMSNorm"; with eps and zero_centered.
        post_norm: normalize after adding, else before each part. `residual` says how.
        parallel: attention and MLP read the same normalized input and are added at once.
        dropout: of each part's output; attention_dropout: of the probabilities.
        drop_path: probability of leaving a part out of a sample.
        options: those of DenseGeneral, and `partition`; the others are those of MultiHeadAttention and MLP.
    Submodules: `attention`, `cross_attention`, `mlp`, and `attention_norm`, `cross_attention_norm`, `mlp_norm`
    (parallel: `norm` alone).
    """

    def __init__(
        self,
        features: int,
        heads: int,
        hidden: int,
        *,
        groups: int | None = None,
        head_dim: int | None = None,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        eps: float = 1e-6,
        zero_centered: bool = False,
        post_norm: bool = False,
        parallel: bool = False,
        memory_features: int | None = None,
        mask_type: str = "causal",
        cross_mask_type: str = "none",
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        fused: bool = True,
        rope: Rope | None = None,
        qk_norm: str | None = None,
        qk_norm_after_rope: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        param_dtype: DTypeLike = jnp.float32,
        name: str = "",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if parallel and (post_norm or memory_features is not None):
            raise ValueError("a parallel TransformerLayer is pre-norm and has no cross attention")
        options = options | {"param_dtype": param_dtype, "rngs": rngs}
        of_attention: dict[str, Any] = {
            "groups": groups,
            "head_dim": head_dim,
            "fused": fused,
            "scale": scale,
            "soft_cap": soft_cap,
        }
        of_attention |= options | {"dropout": attention_dropout}
        self.attention = MultiHeadAttention(
            features,
            heads,
            rope=rope,
            qk_norm=qk_norm,
            qk_norm_after_rope=qk_norm_after_rope,
            mask_type=mask_type,
            window=window,
            name=joined(name, "attention"),
            **of_attention,
        )
        self.cross_attention = nnx.data(None)
        if memory_features is not None:
            self.cross_attention = MultiHeadAttention(
                features,
                heads,
                memory_features=memory_features,
                mask_type=cross_mask_type,
                name=joined(name, "cross_attention"),
                **of_attention,
            )
        self.mlp = MLP(features, hidden, activation=activation, name=joined(name, "mlp"), **options)

        def norm() -> Any:
            return make_norm(normalization, features, eps=eps, zero_centered=zero_centered, param_dtype=param_dtype)

        if parallel:
            self.norm = norm()
        else:
            self.attention_norm = norm()
            self.cross_attention_norm = nnx.data(None if memory_features is None else norm())
            self.mlp_norm = norm()
        self.post_norm = post_norm
        self.parallel = parallel
        self.drop_path = drop_path
        self.drop = nnx.Dropout(dropout, rngs=rngs if dropout else None)
        self.deterministic = False
        self.rngs = dropout_stream(rngs, drop_path)

    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        bias: Array | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
    ) -> Array:
        """x [B, S, d] to [B, S, d].

        Args:
            memory: [B, Sm, dm], what cross attention attends to.
            mask, bias, positions, offset: of the self attention; memory_mask of the cross attention.
        Raises:
            ValueError: a memory is missing or not wanted; and as the parts.
        """
        cross = self.cross_attention
        if (cross is None) is not (memory is None):
            raise ValueError(
                "TransformerLayer has no cross attention; make it with memory_features or give no memory"
                if cross is None
                else "TransformerLayer needs a memory"
            )

        parts: list[Any] = [
            lambda h: self.attention(h, mask=mask, bias=bias, positions=positions, offset=offset),
            self.mlp,
        ]
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
