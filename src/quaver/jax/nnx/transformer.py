"""A whole layer: attention, perhaps attention to a memory, and an MLP, around the residual stream."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from flax import nnx
from jax import Array

from quaver.core.options import pick, takes
from quaver.jax.blocks.attention.dot_product import Mask
from quaver.jax.blocks.options import PartOptions, TransformerOptions, of_cross_attention, of_self_attention
from quaver.jax.blocks.residuals import drop_path, residual
from quaver.jax.nnx.attention import MultiHeadAttention, dropout_stream
from quaver.jax.nnx.dense import Parameters, of_part
from quaver.jax.nnx.mlp import MLP
from quaver.jax.nnx.norm import norm_of


@dataclass
class TransformerArguments(TransformerOptions, Parameters):
    """The arguments of `TransformerLayer`, which says what they are."""

    features: int
    heads: int
    hidden: int
    _: KW_ONLY
    memory_features: int | None = None


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
        others: those of MultiHeadAttention and MLP.
    Submodules: `attention`, `cross_attention`, `mlp`, and `attention_norm`, `cross_attention_norm`, `mlp_norm`
    (parallel: `norm` alone).
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
            of_cross = of_cross_attention(options) | of_part(options, "cross_attention")
            self.cross_attention = MultiHeadAttention(features, options.heads, memory_features=memory, **of_cross)
        of_mlp = pick(PartOptions, options) | of_part(options, "mlp")
        self.mlp = MLP(features, options.hidden, activation=options.activation, **of_mlp)
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
