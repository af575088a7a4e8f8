"""Transformer Engine's `MultiheadAttention`, made of its modules, so that parameters have its names."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention
from quaver.compat.transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from quaver.compat.transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from quaver.compat.transformer_engine.pytorch.module.linear import Linear, only
from quaver.compat.transformer_engine.pytorch.module.parameters import Common
from quaver.core.options import takes
from quaver.core.text.spelling import check_name
from quaver.torch.blocks.prologues.norm import named

NORMS = {"L2Normalization": "L2", "RMSNorm": "RMSNorm", "LayerNorm": "LayerNorm"}


@dataclass
class AttentionArguments(Common):
    """The arguments of `MultiheadAttention`."""

    hidden_size: int
    num_attention_heads: int
    kv_channels: int | None = None
    attention_dropout: float = 0.1
    layernorm_epsilon: float = 1e-5
    _: KW_ONLY
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    layer_number: int | None = None
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    num_gqa_groups: int | None = None
    return_layernorm_output: bool = False
    input_layernorm: bool = False
    attention_type: str = "self"
    set_parallel_mode: bool = False
    fuse_qkv_params: bool = False
    zero_centered_gamma: bool = False
    qkv_weight_interleaved: bool = True
    rotary_pos_interleaved: bool = False
    normalization: str = "LayerNorm"
    qkv_format: str = "sbhd"
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    softmax_type: str = "vanilla"
    softcap: float = 0.0


class MultiheadAttention(nn.Module):
    """Transformer Engine's `MultiheadAttention`: (output, bias, the norm's output), as much of it as is asked for.

    Without `fuse_qkv_params` the weight of queries, keys and values is put together and quantized in each forward.
    """

    @takes(AttentionArguments)
    def __init__(self, options: AttentionArguments) -> None:
        super().__init__()
        check_name("attention_type", options.attention_type, ("self", "cross"))
        heads, groups = options.num_attention_heads, options.num_gqa_groups or options.num_attention_heads
        self.head_dim = options.kv_channels or options.hidden_size // heads
        self.groups, self.attention_type = groups, options.attention_type
        self.interleaved = options.qkv_weight_interleaved and options.fuse_qkv_params
        self.rotary_pos_interleaved = options.rotary_pos_interleaved
        self.norm_first = options.qk_norm_before_rope
        self.return_layernorm_output = options.input_layernorm and options.return_layernorm_output
        rows = {"query": heads * self.head_dim, "key": groups * self.head_dim, "value": groups * self.head_dim}
        first = rows if self.attention_type == "self" else {"query": rows.pop("query")}
        self.entrance = self._project(options, first)
        if self.attention_type == "cross":
            self.key_value = self._linear(options, rows)
        self.core_attention = DotProductAttention(
            heads,
            self.head_dim,
            groups,
            options.attention_dropout,
            options.qkv_format,
            options.attn_mask_type,
            options.window_size,
            layer_number=options.layer_number,
            softmax_type=options.softmax_type,
            softcap=options.softcap,
        )
        own = {"return_bias": options.return_bias, "init_method": options.output_layer_init_method}
        self.proj = Linear(heads * self.head_dim, options.hidden_size, **options.shared | own)
        for name in ("q_norm", "k_norm"):
            self.register_module(name, self._norm(options))

    def _project(self, options: AttentionArguments, rows: dict[str, int]) -> str:
        """Make the projection of queries, and of itself keys and values; returns its name."""
        whole = self.attention_type == "self"
        if not options.input_layernorm:
            name = "qkv" if whole else "query_layer"
            setattr(self, name, self._linear(options, rows))
            return name
        name = "layernorm_qkv" if whole else "layernorm_query"
        layer = LayerNormLinear(
            options.hidden_size,
            sum(rows.values()),
            parameters_split=None if options.fuse_qkv_params else rows,
            init_method=options.init_method,
            eps=options.layernorm_epsilon,
            normalization=options.normalization,
            zero_centered_gamma=options.zero_centered_gamma,
            return_layernorm_output=options.return_layernorm_output,
            **options.shared,
        )
        setattr(self, name, layer)
        return name

    def _linear(self, options: AttentionArguments, rows: dict[str, int]) -> Linear:
        split = None if options.fuse_qkv_params or list(rows) == ["query"] else rows
        own = {"init_method": options.init_method, "parameters_split": split}
        return Linear(options.hidden_size, sum(rows.values()), **options.shared | own)

    def _norm(self, options: AttentionArguments) -> nn.Module | None:
        if options.qk_norm_type is None:
            return None
        check_name("qk_norm_type", options.qk_norm_type, NORMS)
        # Its L2 divides by the length, ours by the root of the mean.
        self.l2 = options.qk_norm_type == "L2Normalization"
        eps = options.qk_norm_eps / self.head_dim if self.l2 else options.qk_norm_eps
        return named(NORMS[options.qk_norm_type], self.head_dim, eps, **options.like)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        **of_attention: Any,
    ) -> Any:
        """What else it takes: `quaver.compat.transformer_engine.pytorch.attention.dot_product_attention.Call`."""
        projected = getattr(self, self.entrance)(hidden_states)
        projected, *normalized = projected if self.return_layernorm_output else (projected,)
        several = self.core_attention.heads // self.groups
        if self.attention_type == "self":
            q, k, v = self._parted(projected, (several, 1, 1))
        else:
            q = projected.unflatten(-1, (-1, self.head_dim))
            k, v = self._parted(self.key_value(encoder_output), (1, 1))
        q, k = self._turned(q, k, rotary_pos_emb, inference_params, of_attention)
        y = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params,
            **of_attention,
        )
        output = self.proj(y)
        return only((*(output if isinstance(output, tuple) else (output,)), *normalized))

    def _parted(self, x: Tensor, heads: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Heads [..., heads, D] of a projection: those of a group beside one another, or all queries first."""
        if self.interleaved:
            parts = x.unflatten(-1, (self.groups, -1, self.head_dim)).split(heads, -2)
            return tuple(part.flatten(-3, -2) for part in parts)
        return x.unflatten(-1, (-1, self.head_dim)).split([n * self.groups for n in heads], -2)

    def _turned(self, q: Tensor, k: Tensor, angles: Any, cache: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        both, names = [q, k], ("q_norm", "k_norm")
        if self.norm_first:
            both = [self._normalized(x, name) for x, name in zip(both, names, strict=True)]
        if angles is not None:
            pair = angles if isinstance(angles, tuple) else (angles, angles)
            start = None if cache is None else cache.get_seqlens_pre_step().to(q.device)
            of_q, of_kv = given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")
            ends = of_q, of_q if of_kv is None else of_kv
            layout = self.core_attention.layout
            both = [
                apply_rotary_pos_emb(x, f, layout, start, self.rotary_pos_interleaved, cu_seqlens=e)
                for x, f, e in zip(both, pair, ends, strict=True)
            ]
        if not self.norm_first:
            both = [self._normalized(x, name) for x, name in zip(both, names, strict=True)]
        return both[0], both[1]

    def _normalized(self, x: Tensor, name: str) -> Tensor:
        norm: Any = self._modules[name]
        if norm is None:
            return x
        y: Tensor = norm(x)
        return y * self.head_dim**-0.5 if self.l2 else y
