"""Layers of transformers beside ours: their names here, and the origin of each parameter's rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.exaone4 import modeling_exaone4 as exaone4
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from quaver.torch.nn.attention.multihead import MultiheadAttention
from quaver.torch.nn.attention.rope import RotaryEmbedding
from quaver.torch.nn.transformer import TransformerLayer

#: Our module's name, and theirs, whose rows stand in this order.
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of transformers and the constructor arguments of our equivalent."""

    config: PreTrainedConfig
    #: Their layer and what makes its cosines and sines.
    layer: type[nn.Module]
    rotary: type[nn.Module]
    names: Names
    options: dict[str, Any]
    ours: type[nn.Module] = TransformerLayer
    #: Their order of the rows of query, key and value in one matrix, to ours.
    rows: Callable[[Tensor], Tensor] = lambda rows: rows
    window: int | None = None
    chunk: int | None = None

    def build(self, mask_type: str) -> nn.Module:
        """Ours; an arbitrary mask has window and chunks in it."""
        c = self.config
        chunk = None if mask_type == "arbitrary" else self.chunk
        window = None if self.window is None or mask_type == "arbitrary" else (self.window - 1, -1)
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        rope = RotaryEmbedding(
            head_dim,
            scaling=c.rope_parameters,
            max_positions=c.max_position_embeddings,
            interleaved=c.model_type in ("cohere", "llama4_text"),
        )
        options = {"rope": rope, "head_dim": head_dim, "mask_type": mask_type, "window": window, "chunk": chunk}
        options |= self.options
        sizes = (c.hidden_size, c.num_attention_heads)
        return self.ours(*sizes, *([HIDDEN] if self.ours is TransformerLayer else []), **options)

    def mapped(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Their parameters under our names, or their gradients: the map is linear."""
        weights, left = {}, set(theirs)
        for name, sources in self.names.items():
            for kind in (".weight", ".bias", ""):
                keys = [s + kind for s in sources if s + kind in theirs]
                if keys:
                    whole = torch.cat([theirs[k] for k in keys])
                    weights[name + kind] = self.rows(whole) if name.endswith("qkv_proj") else whole
                    left -= set(keys)
        assert not left, f"no place for {sorted(left)}"
        return weights


DIM, HEADS, GROUPS, HIDDEN = 32, 4, 2, 48
SIZES = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FALCON = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OF_LLAMA: Names = {
    "attention.norm": ("input_layernorm",),
    "attention.qkv_proj": QKV,
    "attention.o_proj": ("self_attn.o_proj",),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
NORMS_AFTER: Names = {k: v for k, v in OF_LLAMA.items() if not k.endswith(".norm")} | {
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
OF_FALCON: Names = {
    "norm": ("input_layernorm",),
    "attention.qkv_proj": ("self_attention.query_key_value",),
    "attention.o_proj": ("self_attention.dense",),
    "mlp.up_proj": ("mlp.dense_h_to_4h",),
    "mlp.down_proj": ("mlp.dense_4h_to_h",),
}


def separate(names: Names) -> Names:
    """The same layer made with fused=False."""
    unfused: Names = {}
    for name, sources in names.items():
        if name.endswith(("qkv_proj", "gate_up_proj")):
            part = name.partition(".")[0]
            unfused |= {f"{part}.{source.rpartition('.')[2]}": (source,) for source in sources}
        else:
            unfused[name] = sources
    return unfused


def head_by_head(rows: Tensor) -> Tensor:
    """GPT-NeoX: each head's query, key and value together."""
    return rows.unflatten(0, (HEADS, 3, DIM // HEADS)).transpose(0, 1).flatten(0, 2)


def group_by_group(rows: Tensor) -> Tensor:
    """Falcon 40B: each group's queries, then its key and its value."""
    grouped = rows.unflatten(0, (GROUPS, HEADS // GROUPS + 2, DIM // HEADS))
    shared = HEADS // GROUPS
    return torch.cat([part.flatten(0, 2) for part in grouped.split([shared, 1, 1], 1)])


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
RMS: dict[str, Any] = {"normalization": "RMSNorm", "eps": 1e-6, "bias": False, "activation": "swiglu"}

LAYERS: dict[str, Layer] = {
    "llama": Layer(
        config=LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        layer=llama.LlamaDecoderLayer,
        rotary=llama.LlamaRotaryEmbedding,
        names=OF_LLAMA,
        options=RMS | {"groups": GROUPS},
    ),
    "llama, separate": Layer(
        config=LlamaConfig(**SIZES, rope_parameters=PLAIN, attention_bias=True),
        layer=llama.LlamaDecoderLayer,
        rotary=llama.LlamaRotaryEmbedding,
        names=separate(OF_LLAMA),
        options=RMS | {"groups": GROUPS, "fused": False, "attention_bias": True},
    ),
    "mistral": Layer(
        config=MistralConfig(**SIZES, sliding_window=4, rope_parameters=PLAIN),
        layer=mistral.MistralDecoderLayer,
        rotary=mistral.MistralRotaryEmbedding,
        names=OF_LLAMA,
        options=RMS | {"groups": GROUPS},
        window=4,
    ),
    "falcon": Layer(
        config=FalconConfig(**FALCON, ffn_hidden_size=HIDDEN, rope_parameters=PLAIN),
        layer=falcon.FalconDecoderLayer,
        rotary=falcon.FalconRotaryEmbedding,
        names=OF_FALCON,
        options={"groups": 1, "parallel": True, "bias": False, "activation": "gelu_exact"},
    ),
    "falcon 40b": Layer(
        config=FalconConfig(
            **FALCON,
            num_kv_heads=GROUPS,
            new_decoder_architecture=True,
            ffn_hidden_size=HIDDEN,
            rope_parameters=PLAIN,
        ),
        layer=falcon.FalconDecoderLayer,
        rotary=falcon.FalconRotaryEmbedding,
        names={k: v for k, v in OF_FALCON.items() if k != "norm"}
        | {"attention.norm": ("ln_attn",), "mlp.norm": ("ln_mlp",)},
        options={"groups": GROUPS, "parallel": "two_norms", "bias": False, "activation": "gelu_exact"},
        rows=group_by_group,
    ),
    "gemma2": Layer(
        config=Gemma2Config(
            **SIZES,
            head_dim=16,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            sliding_window=4,
            rope_parameters=PLAIN,
        ),
        layer=gemma2.Gemma2DecoderLayer,
        rotary=gemma2.Gemma2RotaryEmbedding,
        names=OF_LLAMA
        | {
            "attention_post_norm": ("post_attention_layernorm",),
            "mlp.norm": ("pre_feedforward_layernorm",),
            "mlp_post_norm": ("post_feedforward_layernorm",),
        },
        options=RMS
        | {
            "groups": GROUPS,
            "activation": "geglu",
            "zero_centered": True,
            "norm_position": "sandwich",
            "scale": 24**-0.5,
            "soft_cap": 2.0,
        },
        window=4,
    ),
    "gpt_neox": Layer(
        config=GPTNeoXConfig(
            **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
            rope_parameters=PLAIN | {"partial_rotary_factor": 0.25},
        ),
        layer=gpt_neox.GPTNeoXLayer,
        rotary=gpt_neox.GPTNeoXRotaryEmbedding,
        names={
            "attention.norm": ("input_layernorm",),
            "attention.qkv_proj": ("attention.query_key_value",),
            "attention.o_proj": ("attention.dense",),
            "mlp.norm": ("post_attention_layernorm",),
            "mlp.up_proj": ("mlp.dense_h_to_4h",),
            "mlp.down_proj": ("mlp.dense_4h_to_h",),
        },
        options={"parallel": "two_norms", "activation": "gelu_exact"},
        rows=head_by_head,
    ),
    "qwen3": Layer(
        config=Qwen3Config(**SIZES, head_dim=16, rope_parameters=PLAIN),
        layer=qwen3.Qwen3DecoderLayer,
        rotary=qwen3.Qwen3RotaryEmbedding,
        names=OF_LLAMA | {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)},
        options=RMS | {"groups": GROUPS, "qk_norm": "RMSNorm"},
    ),
    "cohere": Layer(
        config=CohereConfig(**SIZES, rope_parameters=PLAIN),
        layer=cohere.CohereDecoderLayer,
        rotary=cohere.CohereRotaryEmbedding,
        names={k: v for k, v in OF_LLAMA.items() if not k.endswith(".norm")} | {"norm": ("input_layernorm",)},
        options={"groups": GROUPS, "parallel": True, "bias": False, "norm_bias": False, "activation": "swiglu"},
    ),
    "llama4 attention": Layer(
        config=Llama4TextConfig(
            **SIZES,
            head_dim=8,
            use_qk_norm=True,
            attention_bias=False,
            attention_chunk_size=4,
            rms_norm_eps=1e-2,
            rope_parameters=PLAIN,
        ),
        layer=llama4.Llama4TextAttention,
        rotary=llama4.Llama4TextRotaryEmbedding,
        names={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
        options={"groups": GROUPS, "bias": False, "qk_norm": "L2", "qk_norm_eps": 1e-2, "qk_norm_after_rope": True},
        ours=MultiheadAttention,
        chunk=4,
    ),
    "cohere, norms of heads": Layer(
        config=CohereConfig(**SIZES, rope_parameters=PLAIN, use_qk_norm=True),
        layer=cohere.CohereDecoderLayer,
        rotary=cohere.CohereRotaryEmbedding,
        names={k: v for k, v in OF_LLAMA.items() if not k.endswith(".norm")}
        | {"norm": ("input_layernorm",)}
        | {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)},
        options={"groups": GROUPS, "parallel": True, "bias": False, "norm_bias": False, "activation": "swiglu"}
        | {"qk_norm": "LayerNorm", "qk_norm_scope": "each_head"},
    ),
    "olmo2": Layer(
        config=Olmo2Config(**SIZES, rope_parameters=PLAIN),
        layer=olmo2.Olmo2DecoderLayer,
        rotary=olmo2.Olmo2RotaryEmbedding,
        names=NORMS_AFTER,
        options=RMS
        | {"groups": GROUPS, "norm_position": "res_post", "eps": 1e-5, "qk_norm": "RMSNorm"}
        | {"qk_norm_scope": "all_heads"},
    ),
    "exaone4": Layer(
        config=Exaone4Config(**SIZES, rope_parameters=PLAIN, sliding_window=4, layer_types=["sliding_attention"]),
        layer=exaone4.Exaone4DecoderLayer,
        rotary=exaone4.Exaone4RotaryEmbedding,
        names=NORMS_AFTER,
        options=RMS | {"groups": GROUPS, "norm_position": "res_post", "eps": 1e-5, "qk_norm": "RMSNorm"},
        window=4,
    ),
    "llama4 attention, no rope": Layer(
        config=Llama4TextConfig(
            **SIZES,
            head_dim=8,
            attention_bias=False,
            rope_parameters=PLAIN,
            no_rope_layers=[0],
            attn_temperature_tuning=True,
            attn_scale=0.4,
            floor_scale=3,
        ),
        layer=llama4.Llama4TextAttention,
        rotary=llama4.Llama4TextRotaryEmbedding,
        names={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
        options={"groups": GROUPS, "bias": False, "rope": None, "temperature": (0.4, 3)},
        ours=MultiheadAttention,
    ),
    "gpt_oss attention": Layer(
        config=GptOssConfig(
            **SIZES | {"max_position_embeddings": 1024}, head_dim=16, sliding_window=4, rope_parameters=YARN
        ),
        layer=gpt_oss.GptOssAttention,
        rotary=gpt_oss.GptOssRotaryEmbedding,
        names={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",), "core.sinks": ("sinks",)},
        options={"groups": GROUPS, "sinks": "learnable"},
        ours=MultiheadAttention,
        window=4,
    ),
}
