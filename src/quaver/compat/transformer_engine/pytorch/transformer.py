"""Transformer Engine's `TransformerLayer`, built of its modules so that parameters have its names."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quaver.compat.transformer_engine.pytorch.attention.dot_product_attention import Window
from quaver.compat.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from quaver.compat.transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from quaver.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from quaver.compat.transformer_engine.pytorch.module.parameters import Assembled, cast_to_autocast
from quaver.options import shared, spreads
from quaver.recipes.text import check_name
from quaver.torch.nn.transformer import drop_path

#: Options of attention that a layer names differently or sets itself.
OF_ATTENTION = (
    *("attn_mask_type", "qkv_format", "attention_type", "input_layernorm", "return_layernorm_output", "return_bias"),
)


class TransformerLayer(Assembled):
    """Transformer Engine's `TransformerLayer`; `ub_*` options have no effect.

    Raises:
        ValueError: contradictory options, unknown names, or several ranks.
    """

    @spreads(MultiheadAttention, without=OF_ATTENTION)
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1, *,
        kv_channels: int | None = None, self_attn_mask_type: str = "causal", window_size: Window = None,
        enc_dec_attn_mask_type: str = "no_mask", enc_dec_window_size: Window = None,
        apply_residual_connection_post_layernorm: bool = False, output_layernorm: bool = False,
        parallel_attention_mlp: bool = False, layer_type: str = "encoder", drop_path_rate: float = 0.0,
        ub_tp_comm_overlap: bool = False, activation: str = "gelu", activation_params: Any = None,
        attn_input_format: str = "sbhd", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_name("layer_type", layer_type, ("encoder", "decoder"))
        post, decodes = apply_residual_connection_post_layernorm, layer_type == "decoder"
        if parallel_attention_mlp and (post or output_layernorm or decodes):
            raise ValueError(
                "parallel_attention_mlp needs an encoder with norms before attention and MLP: leave "
                "layer_type, output_layernorm and apply_residual_connection_post_layernorm out"
            )
        self.parallel_attention_mlp, self.attn_input_format = parallel_attention_mlp, attn_input_format
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        both = others | {"return_layernorm_output": post}
        own: Any = both | {"num_gqa_groups": num_gqa_groups, "kv_channels": kv_channels}
        own |= {"attention_dropout": attention_dropout, "layernorm_epsilon": layernorm_epsilon}
        attention = partial(MultiheadAttention, hidden_size, num_attention_heads, qkv_format=attn_input_format, **own)
        arguments: Any = {"attn_mask_type": self_attn_mask_type, "window_size": window_size}
        self.self_attention = attention(input_layernorm=not output_layernorm, **arguments)
        if decodes:
            arguments = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
            self.inter_attention = attention(attention_type="cross", input_layernorm=True, **arguments)
        mlp_options: Any = shared(LayerNormMLP, both) | {
            "activation": activation,
            "activation_params": activation_params,
        }
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, layernorm_epsilon, **mlp_options)
        if output_layernorm:
            kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[others.get("normalization", "LayerNorm")]
            self.layernorm = kind(hidden_size, layernorm_epsilon, **shared(kind, others))

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, self_attn_mask_type: str | None = None,
        window_size: Window = None, encoder_output: Tensor | None = None, enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None, enc_dec_window_size: Window = None,
        is_first_microbatch: bool | None = None, checkpoint_core_attention: bool = False,
        inference_params: Any = None, rotary_pos_emb: Any = None, **of_attention: Any,
    ) -> Tensor:  # fmt: skip
        """Run the layer; further arguments are those of `DotProductAttention`."""
        x, again = cast_to_autocast(hidden_states), {"checkpoint_core_attention": checkpoint_core_attention}
        own: Any = {"attn_mask_type": self_attn_mask_type, "window_size": window_size}
        own |= {"inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb}
        attended = self.self_attention(x, attention_mask, **own, **again, **of_attention)
        if self.parallel_attention_mlp:
            return self._add(x, attended + self.layernorm_mlp(x))
        x = self._after(x, attended)
        if "inter_attention" in self._modules:
            names = "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "softcap"
            again |= {name: of_attention[name] for name in names if name in of_attention}
            own = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
            x = self._after(x, self.inter_attention(x, enc_dec_attn_mask, encoder_output, **own, **again), False)
        x = self._after(x, self.layernorm_mlp(x))
        last: Any = self._modules.get("layernorm")
        return x if last is None else last(x)

    def _after(self, x: Tensor, part: Any, drops: bool = True) -> Tensor:
        """Add a block's output to the residual stream, or to its norm's output if the block returns that."""
        y, x = part if isinstance(part, tuple) else (part, x)
        return self._add(x, y, drops)

    def _add(self, x: Tensor, y: Tensor, drops: bool = True) -> Tensor:
        y = F.dropout(y, self.hidden_dropout, self.training)
        if drops and self.training and self.drop_path_rate:
            # Drops along the first axis, which for "sbhd" is tokens, as in Transformer Engine.
            y = drop_path(y, self.drop_path_rate)
        return x + y
