"""Transformer Engine's linen `TransformerLayer`."""

import enum
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from flax import linen as nn
from jax import Array

from quaver.compat.transformer_engine.jax.flax.attention import (
    HeadFields,
    MultiHeadAttention,
    RelativePositionBiases,
    activation_axes,
    lora_scope,
)
from quaver.compat.transformer_engine.jax.flax.fields import KERNEL_INIT, constrained, part_of
from quaver.compat.transformer_engine.jax.flax.module import LayerNorm, LayerNormMLP
from quaver.compat.transformer_engine.jax.sharding import (
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
)
from quaver.jax.blocks.options import Initializer
from quaver.options import suggests
from quaver.recipes.text import check_name


class TransformerLayerType(enum.Enum):
    """DECODER if a layer has cross attention, else ENCODER."""

    ENCODER = "encoder"
    DECODER = "decoder"


@suggests
class TransformerLayer(nn.Module, HeadFields):
    """Transformer layer with optional cross attention to `encoded`.

    Submodules are `attention` (in a decoder `self_attention` and `encoder_decoder_attention`), `mlp`, `relpos_bias` and
    `output_layernorm`.

    Raises:
        ValueError: heads that do not divide, a decoder without `encoded`, and errors of submodules.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    hidden_dropout: float = field(default=0.1, kw_only=True)
    hidden_dropout_dims: Sequence[int] = field(default=(), kw_only=True)
    attention_dropout: float = field(default=0.1, kw_only=True)
    intermediate_dropout: float = field(default=0.0, kw_only=True)
    intermediate_dropout_dims: Sequence[int] = field(default=(), kw_only=True)
    mha_kernel_init: Initializer | None = field(default=None, kw_only=True)
    mlp_kernel_init: Initializer | None = field(default=None, kw_only=True)
    mlp_activations: Sequence[Any] = field(default=("gelu",), kw_only=True)
    mlp_activation_params: Any = field(default=None, kw_only=True)
    apply_residual_connection_post_layernorm: bool = field(default=False, kw_only=True)
    output_layernorm: bool = field(default=False, kw_only=True)
    float32_attention_logits: bool = field(default=False, kw_only=True)
    layer_type: TransformerLayerType = field(default=TransformerLayerType.ENCODER, kw_only=True)
    self_attn_mask_type: str = field(default="causal", kw_only=True)
    self_attn_bias_type: str | None = field(default=None, kw_only=True)
    enable_relative_embedding: bool = field(default=True, kw_only=True)
    relative_embedding: Any = field(default=None, kw_only=True)
    drop_path: float = field(default=0.0, kw_only=True)
    transpose_batch_sequence: bool = field(default=False, kw_only=True)

    @nn.compact
    def __call__(
        self, inputs: Array, encoded: Array | None = None, attention_mask: Array | None = None,
        encoder_decoder_mask: Array | None = None, deterministic: bool = False, decode: bool = False,
        max_decode_length: int | None = None,
    ) -> Array:  # fmt: skip
        kind = getattr(self.layer_type, "value", self.layer_type)
        check_name("layer_type", kind, [each.value for each in TransformerLayerType])
        if self.hidden_size % self.num_attention_heads or inputs.shape[-1] != self.hidden_size:
            raise ValueError(
                f"TransformerLayer has {self.num_attention_heads} heads, {self.hidden_size} features, and "
                f"inputs of shape {inputs.shape}; inputs must have hidden_size features, a multiple of the "
                "heads"
            )
        decodes = kind == "decoder"
        if decodes and encoded is None:
            raise ValueError("layer_type is DECODER, which attends to `encoded`; pass it, or use ENCODER")
        attend = self._attention("self_attention" if decodes else "attention", not self.output_layernorm)
        bias = self._bias(inputs, not decodes)
        options: dict[str, Any] = {"deterministic": deterministic}
        x = self._added(inputs, attend(inputs, inputs, attention_mask, bias, decode=decode, **options), deterministic)
        if encoded is not None and decodes:
            across = self._attention("encoder_decoder_attention", True, attn_mask_type="padding")
            y = across(x, encoded, encoder_decoder_mask, **options)
            x = self._added(x, y, deterministic, dropped=False)
        x = self._added(x, self._mlp()(x, **options), deterministic)
        return self._last()(x) if self.output_layernorm else x

    def _attention(self, name: str, norm: bool, **arguments: Any) -> MultiHeadAttention:
        arguments = arguments or {
            "attn_mask_type": self.self_attn_mask_type,
            "attn_bias_type": self.self_attn_bias_type,
        }
        arguments |= {"input_layernorm": norm, "return_layernorm_output": self.apply_residual_connection_post_layernorm}
        arguments |= {"head_dim": self.hidden_size // self.num_attention_heads, "kernel_init": self.mha_kernel_init}
        return part_of(self, MultiHeadAttention, name=name, **arguments)

    def _mlp(self) -> LayerNormMLP:
        own: Any = {"scale_axes": (W_NO_SHARD_AXES,), "ln_bias_axes": (W_NO_SHARD_AXES,)}
        own |= {"kernel_axes_1": (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), "bias_axes_1": (W_JOINED_AXES, W_TP_AXES)}
        own |= {"kernel_axes_2": (W_TP_AXES, W_FSDP_AXES), "bias_axes_2": (W_NO_SHARD_AXES,)}
        own |= {"layernorm_input_axes": activation_axes(self, HIDDEN_AXES)}
        own |= {"dot_1_input_axes": activation_axes(self, HIDDEN_AXES, inside=True)}
        own |= {"dot_2_input_axes": activation_axes(self, HIDDEN_TP_AXES, inside=True)}
        own |= {"enable_low_rank_adaptation": lora_scope(self.low_rank_adaptation_scope)["mlp"]}
        own |= {"activations": self.mlp_activations, "activation_params": self.mlp_activation_params}
        own |= {"epsilon": self.layernorm_epsilon, "kernel_init": self.mlp_kernel_init or KERNEL_INIT}
        own |= {"intermediate_dropout_rng_name": self.dropout_rng_name}
        own |= {"intermediate_dropout_rate": self.intermediate_dropout}
        own |= {"intermediate_hidden_dropout_dims": self.intermediate_dropout_dims}
        own |= {"return_layernorm_output": self.apply_residual_connection_post_layernorm}
        return part_of(self, LayerNormMLP, intermediate_dim=self.mlp_hidden_size, name="mlp", **own)

    def _bias(self, x: Array, bidirectional: bool) -> Array | None:
        """Return the relative position bias, from a given module or this layer's own."""
        if not self.enable_relative_embedding:
            return None
        table = self.relative_embedding
        if table is None:
            init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
            heads = self.num_attention_heads
            table = RelativePositionBiases(32, 128, heads, embedding_init=init, dtype=self.dtype, name="relpos_bias")
        tokens = x.shape[0 if self.transpose_batch_sequence else 1]
        bias: Array = table(tokens, tokens, bidirectional)
        return bias

    def _added(self, x: Array, part: tuple[Array, Array | None], deterministic: bool, dropped: bool = True) -> Array:
        """Add a block's output to the residual stream, or to its norm's output if the layer is configured so."""
        y, normed = part
        rng = self.dropout_rng_name
        drop = nn.Dropout(self.hidden_dropout, broadcast_dims=self.hidden_dropout_dims, rng_collection=rng)
        y = drop(y, deterministic=deterministic)
        if dropped and self.drop_path > 0:
            batch = 1 if self.transpose_batch_sequence else 0
            others = tuple(axis for axis in range(y.ndim) if axis != batch)
            path = nn.Dropout(self.drop_path, broadcast_dims=others, rng_collection=rng)
            y = path(y, deterministic=deterministic)
        return constrained(y + (x if normed is None else normed), activation_axes(self, HIDDEN_AXES))

    def _last(self) -> LayerNorm:
        own: Any = {
            "epsilon": self.layernorm_epsilon,
            "scale_axes": (W_NO_SHARD_AXES,),
            "bias_axes": (W_NO_SHARD_AXES,),
        }
        return part_of(self, LayerNorm, bias_init=nn.initializers.zeros, name="output_layernorm", **own)
