"""A whole layer: attention, perhaps attention to a memory, and an MLP, around the residual stream."""

from dataclasses import KW_ONLY

from flax import linen as nn
from jax import Array

from quaver.core.options import pick, suggests
from quaver.jax.blocks.attention.dot_product import Mask
from quaver.jax.blocks.options import PartOptions, TransformerOptions, of_cross_attention, of_self_attention
from quaver.jax.blocks.residuals import drop_path, residual
from quaver.jax.linen.attention import MultiHeadAttention, is_dropping
from quaver.jax.linen.mlp import MLP
from quaver.jax.linen.norm import norm_of


@suggests
class TransformerLayer(nn.Module, TransformerOptions):
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
        others: those of MultiHeadAttention and MLP.
    Submodules: `attention`, `cross_attention`, `mlp`, and `attention_norm`, `cross_attention_norm`, `mlp_norm`
    (parallel: `norm` alone).
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

        attend = MultiHeadAttention(self.heads, **of_self_attention(self), name="attention")
        parts = {
            "attention": lambda h: attend(
                h, mask=mask, bias=bias, positions=positions, offset=offset, deterministic=deterministic
            )
        }
        if self.cross_attention:
            cross = MultiHeadAttention(self.heads, **of_cross_attention(self), name="cross_attention")
            parts["cross_attention"] = lambda h: cross(h, memory, mask=memory_mask, deterministic=deterministic)
        parts["mlp"] = MLP(self.hidden, self.activation, **pick(PartOptions, self), name="mlp")
        norms = [norm_of(self, name) for name in (["norm"] if self.parallel else [f"{part}_norm" for part in parts])]
        return residual(x, list(parts.values()), norms, drop, post_norm=self.post_norm, parallel=self.parallel)
