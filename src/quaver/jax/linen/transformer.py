"""A whole layer: attention, perhaps attention to a memory, and an MLP, around the residual stream."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.attention import Mask
from quaver.jax.heads import Rope
from quaver.jax.linen.attention import MultiHeadAttention, is_dropping
from quaver.jax.linen.dense import Initializer
from quaver.jax.linen.mlp import MLP
from quaver.jax.linen.norm import make_norm
from quaver.jax.residual import drop_path, residual


class TransformerLayer(nn.Module):
    """Encoder (mask_type "none" or "padding"), decoder-only ("causal"), or decoder with cross attention.

    Attributes:
        heads, hidden: query heads, and features inside the MLP.
        cross_attention: attend to a memory too, between attention and MLP.
        mask_type, cross_mask_type: of the two attentions.
        normalization: "LayerNorm" or "RMSNorm"; with eps and zero_centered.
        post_norm: normalize after adding, else before each part. `residual` says how.
        parallel: attention and MLP read the same normalized input and are added at once.
        dropout: of each part's output; attention_dropout: of the probabilities.
        drop_path: probability of leaving a part out of a sample.
        The others are those of MultiHeadAttention and MLP.
    Submodules: `attention`, `cross_attention`, `mlp`, and `attention_norm`, `cross_attention_norm`, `mlp_norm`
    (parallel: `norm` alone).
    """

    heads: int
    hidden: int
    groups: int | None = None
    head_dim: int | None = None
    activation: str = "gelu"
    normalization: str = "LayerNorm"
    eps: float = 1e-6
    zero_centered: bool = False
    post_norm: bool = False
    parallel: bool = False
    cross_attention: bool = False
    mask_type: str = "causal"
    cross_mask_type: str = "none"
    window: tuple[int, int] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    fused: bool = True
    rope: Rope | None = None
    qk_norm: str | None = None
    qk_norm_after_rope: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
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
        memory_mask: Mask | None = None,
        bias: Array | None = None,
        positions: Array | None = None,
        offset: int | Array = 0,
        deterministic: bool | None = None,
    ) -> Array:
        """x [B, S, d] to [B, S, d].

        Args:
            memory: [B, Sm, dm], what cross attention attends to.
            mask, bias, positions, offset: of the self attention; memory_mask of the cross attention.
            deterministic: False applies dropout and drop path, with the rng "dropout".
        Raises:
            ValueError: a memory is missing or not wanted; and as the parts.
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

        attend = MultiHeadAttention(
            self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            fused=self.fused,
            rope=self.rope,
            qk_norm=self.qk_norm,
            qk_norm_after_rope=self.qk_norm_after_rope,
            mask_type=self.mask_type,
            window=self.window,
            **self._of_attention(),
            name="attention",
        )
        parts = {
            "attention": lambda h: attend(
                h, mask=mask, bias=bias, positions=positions, offset=offset, deterministic=deterministic
            )
        }
        if self.cross_attention:
            cross = MultiHeadAttention(
                self.heads,
                groups=self.groups,
                head_dim=self.head_dim,
                fused=self.fused,
                mask_type=self.cross_mask_type,
                **self._of_attention(),
                name="cross_attention",
            )
            parts["cross_attention"] = lambda h: cross(h, memory, mask=memory_mask, deterministic=deterministic)
        parts["mlp"] = MLP(self.hidden, self.activation, **self._of_dense(), name="mlp")
        norms = [self._norm("norm")] if self.parallel else [self._norm(f"{name}_norm") for name in parts]
        return residual(x, list(parts.values()), norms, drop, post_norm=self.post_norm, parallel=self.parallel)

    def _norm(self, name: str) -> Any:
        return make_norm(
            self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered,
            param_dtype=self.param_dtype,
            name=name,
        )

    def _of_attention(self) -> dict[str, Any]:
        own = {"scale": self.scale, "soft_cap": self.soft_cap, "dropout": self.attention_dropout}
        return own | self._of_dense()

    def _of_dense(self) -> dict[str, Any]:
        names = (
            "use_bias",
            "dtype",
            "param_dtype",
            "kernel_init",
            "bias_init",
            "partition",
            "recipe",
            "seed",
        )
        return {name: getattr(self, name) for name in names}
