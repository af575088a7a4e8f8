"""Transformer Engine's `MultiheadAttention`, built of its modules so that parameters have its names."""

from typing import Any

from torch import Tensor

from quaver.compat.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention, Window
from quaver.compat.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from quaver.compat.transformer_engine.pytorch.module.linear import Linear
from quaver.compat.transformer_engine.pytorch.module.parameters import Assembled, Common, Init
from quaver.options import spreads
from quaver.recipes.text import check_name
from quaver.torch.nn.norm import named

NORMS = {"L2Normalization": "L2", "RMSNorm": "RMSNorm", "LayerNorm": "LayerNorm"}


class MultiheadAttention(Assembled):
    """Transformer Engine's `MultiheadAttention`; returns (output, bias, norm output), of which the last two are
    optional.

    Without `fuse_qkv_params`, the weights of queries, keys and values are concatenated and quantized in each forward.
    """

    @spreads(Common)
    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, *, output_layer_init_method: Init = None,
        layer_number: int | None = None, attn_mask_type: str = "causal", window_size: Window = None,
        num_gqa_groups: int | None = None, return_layernorm_output: bool = False, input_layernorm: bool = False,
        attention_type: str = "self", set_parallel_mode: bool = False, fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True, rotary_pos_interleaved: bool = False,
        normalization: str = "LayerNorm", qkv_format: str = "sbhd", qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
        softcap: float = 0.0, **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_name("attention_type", attention_type, ("self", "cross"))
        heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.head_dim, self.attention_type = kv_channels or hidden_size // heads, attention_type
        self.interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.norm_first = rotary_pos_interleaved, qk_norm_before_rope
        self.return_layernorm_output = input_layernorm and return_layernorm_output
        q, kv = heads * self.head_dim, self.groups * self.head_dim
        query_rows, key_rows = {"query": q}, {"key": kv, "value": kv}
        whole, inner = attention_type == "self", others | {"return_bias": False}
        rows = query_rows | key_rows if whole else query_rows
        #: Name of the first projection: of queries, and for self attention also of keys and values.
        self.input_module = ("layernorm_" if input_layernorm else "") + ("qkv" if whole else "query")
        if input_layernorm:
            split = None if fuse_qkv_params else rows
            norm: Any = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
            norm |= {"eps": layernorm_epsilon, "return_layernorm_output": return_layernorm_output}
            first: Any = LayerNormLinear(hidden_size, sum(rows.values()), parameters_split=split, **norm, **inner)
        else:
            self.input_module += "" if whole else "_layer"
            split = rows if whole and not fuse_qkv_params else None
            first = Linear(hidden_size, sum(rows.values()), parameters_split=split, **inner)
        self.register_module(self.input_module, first)
        if not whole:
            split = None if fuse_qkv_params else key_rows
            self.key_value = Linear(hidden_size, 2 * kv, parameters_split=split, **inner)
        core: Any = {"layer_number": layer_number, "softmax_type": softmax_type, "softcap": softcap}
        core |= {"attn_mask_type": attn_mask_type, "window_size": window_size, "qkv_format": qkv_format}
        self.core_attention = DotProductAttention(heads, self.head_dim, self.groups, attention_dropout, **core)
        self.proj = Linear(q, hidden_size, **others | {"init_method": output_layer_init_method})
        if qk_norm_type is not None:
            check_name("qk_norm_type", qk_norm_type, NORMS)
        # Transformer Engine's L2 norm divides by the length, Quaver's by the root mean square.
        self.l2 = qk_norm_type == "L2Normalization"
        eps, like = qk_norm_eps / self.head_dim if self.l2 else qk_norm_eps, Common(**others).like
        for name in ("q_norm", "k_norm"):
            norm = None if qk_norm_type is None else named(NORMS[qk_norm_type], self.head_dim, eps, **like)
            self.register_module(name, norm)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None, window_size: Window = None, is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False, inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None, **of_attention: Any,
    ) -> Any:  # fmt: skip
        """Run attention; further arguments are those of `DotProductAttention`."""
        projected = getattr(self, self.input_module)(hidden_states)
        projected, *normalized = projected if self.return_layernorm_output else (projected,)
        several = self.core_attention.heads // self.groups
        if self.attention_type == "self":
            q, k, v = self._parted(projected, (several, 1, 1))
        else:
            q = projected.unflatten(-1, (-1, self.head_dim))
            k, v = self._parted(self.key_value(encoder_output), (1, 1))
        q, k = self._apply_rope(q, k, rotary_pos_emb, inference_params, of_attention)
        of_attention |= {"attn_mask_type": attn_mask_type, "window_size": window_size}
        again = {"checkpoint_core_attention": checkpoint_core_attention, "inference_params": inference_params}
        output = self.proj(self.core_attention(q, k, v, attention_mask, **again, **of_attention))
        return (*(output if isinstance(output, tuple) else (output,)), *normalized) if normalized else output

    def _parted(self, x: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Split a projection into heads [..., heads, D], interleaved by group or with all queries first."""
        if self.interleaved:
            parts = x.unflatten(-1, (self.groups, -1, self.head_dim)).split(heads, -2)
            return tuple(part.flatten(-3, -2) for part in parts)
        return x.unflatten(-1, (-1, self.head_dim)).split([n * self.groups for n in heads], -2)

    def _apply_rope(
        self, q: Tensor, k: Tensor, angles: Any, cache: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if self.norm_first:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        if angles is not None:
            pair = angles if isinstance(angles, tuple) else (angles, angles)
            start = None if cache is None else cache.get_seqlens_pre_step().to(q.device)
            cu_seqlens_q, cu_seqlens_kv = options.get("cu_seqlens_q"), options.get("cu_seqlens_kv")
            both = (q, pair[0], cu_seqlens_q), (k, pair[1], cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv)
            layout, interleaved = self.core_attention.layout, self.rotary_pos_interleaved
            q, k = (apply_rotary_pos_emb(x, f, layout, start, interleaved, cu_seqlens=e) for x, f, e in both)
        if not self.norm_first:
            q, k = self._normalized(q, "q_norm"), self._normalized(k, "k_norm")
        return q, k

    def _normalized(self, x: Tensor, name: str) -> Tensor:
        norm: Any = self._modules[name]
        if norm is None:
            return x
        y: Tensor = norm(x)
        return y * self.head_dim**-0.5 if self.l2 else y
