"""Transformer Engine's `TransformerLayer`, made of its modules, so that parameters have its names."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention
from quaver.compat.transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from quaver.compat.transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from quaver.compat.transformer_engine.pytorch.module.parameters import Common, Module
from quaver.core.options import takes
from quaver.core.text.spelling import check_name
from quaver.torch.blocks.transformer import drop_path


@dataclass
class LayerArguments(Common):
    """The arguments of `TransformerLayer`; `ub_*` are for several ranks."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    _: KW_ONLY
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    layer_number: int | None = None
    kv_channels: int | None = None
    self_attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    enc_dec_attn_mask_type: str = "no_mask"
    enc_dec_window_size: tuple[int, int] | None = None
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    parallel_attention_mlp: bool = False
    layer_type: str = "encoder"
    drop_path_rate: float = 0.0
    set_parallel_mode: bool = False
    fuse_qkv_params: bool = False
    zero_centered_gamma: bool = False
    qkv_weight_interleaved: bool = True
    rotary_pos_interleaved: bool = False
    ub_tp_comm_overlap: bool = False
    activation: str = "gelu"
    activation_params: Any = None
    normalization: str = "LayerNorm"
    attn_input_format: str = "sbhd"
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    softmax_type: str = "vanilla"
    softcap: float = 0.0


#: What attention takes as the layer does.
OF_ATTENTION = (
    *("layernorm_epsilon", "attention_dropout", "layer_number", "num_gqa_groups", "fuse_qkv_params", "kv_channels"),
    *("qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope"),
    *("softmax_type", "softcap"),
)


class TransformerLayer(nn.Module):
    """Transformer Engine's `TransformerLayer`.

    Raises:
        ValueError: options that exclude one another, unknown names, several ranks.
    """

    @takes(LayerArguments)
    def __init__(self, options: LayerArguments) -> None:
        super().__init__()
        check_name("layer_type", options.layer_type, ("encoder", "decoder"))
        post, last = options.apply_residual_connection_post_layernorm, options.output_layernorm
        if options.parallel_attention_mlp and (post or last or options.layer_type == "decoder"):
            raise ValueError(
                "parallel_attention_mlp is of an encoder that normalizes before its parts: leave layer_type, "
                "output_layernorm and apply_residual_connection_post_layernorm out"
            )
        self.parallel_attention_mlp, self.from_norm = options.parallel_attention_mlp, post
        self.attn_input_format, self.hidden_dropout = options.attn_input_format, options.hidden_dropout
        self.drop_path_rate = options.drop_path_rate
        names = "normalization", "zero_centered_gamma", "init_method", "output_layer_init_method"
        of_norm = {name: getattr(options, name) for name in names} | {"return_layernorm_output": post}
        own: dict[str, Any] = {name: getattr(options, name) for name in OF_ATTENTION} | {
            "qkv_format": options.attn_input_format
        }
        own |= options.shared | of_norm
        heads: Any = options.hidden_size, options.num_attention_heads
        masks = options.self_attn_mask_type, options.enc_dec_attn_mask_type
        windows = options.window_size, options.enc_dec_window_size
        asked: dict[str, Any] = {"attn_mask_type": masks[0], "window_size": windows[0], "input_layernorm": not last}
        self.self_attention = MultiheadAttention(*heads, **own | asked)
        if options.layer_type == "decoder":
            asked = {"attn_mask_type": masks[1], "window_size": windows[1], "attention_type": "cross"}
            self.inter_attention = MultiheadAttention(*heads, **own | asked | {"input_layernorm": True})
        self.layernorm_mlp = LayerNormMLP(
            options.hidden_size,
            options.ffn_hidden_size,
            eps=options.layernorm_epsilon,
            activation=options.activation,
            activation_params=options.activation_params,
            **options.shared | of_norm,
        )
        if last:
            kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[options.normalization]
            like = {"params_dtype": options.params_dtype, "device": options.device}
            centered = options.zero_centered_gamma
            self.layernorm = kind(options.hidden_size, options.layernorm_epsilon, zero_centered_gamma=centered, **like)

    def backward_dw(self) -> None:
        """Compute the gradients of weights that wait."""
        for module in self.modules():
            if isinstance(module, Module):
                module.backward_dw()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        **of_attention: Any,
    ) -> Tensor:
        """What else it takes: `quaver.compat.transformer_engine.pytorch.attention.dot_product_attention.Call`."""
        x, again = hidden_states, {"checkpoint_core_attention": checkpoint_core_attention}
        attended = self.self_attention(
            x,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            inference_params=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            **again,
            **of_attention,
        )
        if self.parallel_attention_mlp:
            return self._add(x, attended + self.layernorm_mlp(x))
        x = self._after(x, attended)
        if "inter_attention" in self._modules:
            names = "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "softcap"
            again |= {name: of_attention[name] for name in names if name in of_attention}
            own: Any = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
            x = self._after(x, self.inter_attention(x, enc_dec_attn_mask, encoder_output, **own, **again), False)
        x = self._after(x, self.layernorm_mlp(x))
        last: Any = self._modules.get("layernorm")
        return x if last is None else last(x)

    def _after(self, x: Tensor, part: Any, drops: bool = True) -> Tensor:
        """The residual stream after a part, whose norm's output it goes on from where that is given."""
        y, x = part if isinstance(part, tuple) else (part, x)
        return self._add(x, y, drops)

    def _add(self, x: Tensor, y: Tensor, drops: bool = True) -> Tensor:
        y = F.dropout(y, self.hidden_dropout, self.training)
        if drops and self.training and self.drop_path_rate:
            # The first axis, which of "sbhd" is tokens, as there.
            y = drop_path(y, self.drop_path_rate)
        return x + y
