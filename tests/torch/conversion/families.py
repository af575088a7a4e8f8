"""Tiny models of transformers' families, of random weights: the class, and what its configuration is given."""

import contextlib
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

#: What configurations call sizes; a family takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "encoder_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("hidden_dim", "intermediate_size_mlp", "shared_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_dim"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("embedding_size", "embedding_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("tie_word_embeddings",), False),
    **dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    "attention_hidden_size": 64,
}

#: What a family wants otherwise.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"head_dim": 16, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 16},
    "gptj": {"rotary_dim": 16},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    | {"mamba_d_state": 16, "mamba_dt_rank": 16, "use_mamba_kernels": False},
    "hunyuan_v1_moe": {"head_dim": 32, "moe_topk": 2},
    "t5": {"decoder_start_token_id": 0},
    "switch_transformers": {
        "decoder_start_token_id": 0,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "marian": {"decoder_vocab_size": 96},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "falcon_mamba": {"intermediate_size": 128, "time_step_rank": 16},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
    | {"attn_layer_indices": [1]},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 8}
    | {"layers_block_type": ["linear_attention", "full_attention"], "use_mamba_kernels": True},
    "zamba2": {"n_mamba_heads": 4, "mamba_headdim": 32, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 8}
    | {"adapter_rank": 16, "layers_block_type": ["linear_attention", "hybrid"], "use_mem_rope": True}
    | {"attention_hidden_size": 128, "attention_head_dim": 64, "hybrid_layer_ids": [1]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_n_groups": 2, "mamba_d_state": 16}
    | {"mamba_chunk_size": 8},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
    | {"mamba_chunk_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32}
    | {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
}
CAUSAL = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "falcon"),
    *("gpt2", "mpt", "olmo", "olmo2", "exaone4", "cohere", "starcoder2", "stablelm", "bloom", "opt", "gptj", "codegen"),
    *("gpt_neo", "persimmon", "glm4", "granite", "nemotron", "smollm3", "xglm", "biogpt", "gpt_bigcode", "openai-gpt"),
    *("rwkv", "mamba", "mamba2", "jamba", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("bamba", "nemotron_h", "zamba2", "falcon_mamba"),
    *("olmoe", "granitemoe", "dbrx", "jetmoe", "llama4_text", "phimoe", "glm4_moe", "ernie4_5_moe", "aria_text"),
)
MASKED = ("bert", "roberta", "albert", "electra", "distilbert", "deberta-v2", "modernbert", "mpnet")
SEQ2SEQ = ("t5", "bart", "mt5", "pegasus", "marian", "m2m_100", "switch_transformers")
FAMILIES = {
    **dict.fromkeys(CAUSAL, AutoModelForCausalLM),
    **dict.fromkeys(MASKED, AutoModelForMaskedLM),
    **dict.fromkeys(SEQ2SEQ, AutoModelForSeq2SeqLM),
}
#: Families that the tables of the documentation do not list.
OTHERS = dict.fromkeys(("falcon_h1", "granitemoehybrid", "qwen3_5_moe_text"), AutoModelForCausalLM)


def tiny(family: str, **more: Any) -> Any:
    """A model of a family, the same at every call."""
    config = AutoConfig.for_model(family)
    for name, value in {**SIZES, **EXCEPTIONS.get(family, {}), **more}.items():
        given = name in EXCEPTIONS.get(family, {}) or name in more
        if given or getattr(config, name, None) is not None or name == "pad_token_id":
            # Some are computed from others.
            with contextlib.suppress(AttributeError):
                part = getattr(config, name, None)
                if isinstance(value, dict) and part is not None:
                    for key, inner in value.items():
                        setattr(part, key, inner)
                else:
                    setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        with contextlib.suppress(AttributeError):
            if getattr(config, name, None):
                setattr(config, name, list(getattr(config, name))[:2])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return (FAMILIES | OTHERS)[family].from_config(config)


def tokens(seed: int = 0) -> torch.Tensor:
    """[2, 12]."""
    return torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(seed))
