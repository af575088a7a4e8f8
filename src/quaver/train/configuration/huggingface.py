"""What a trained decoder is called among Hugging Face's models, whose names and configuration servers know.

Llama, Mistral and Qwen3 are decoders of the same parts. Other families keep the trainer's own names.
"""

import re
from typing import Any

from quaver.train.configuration.parameter_table import padded
from quaver.train.configuration.sizes import ModelConfig

#: The trainer's names that differ, as patterns, and Hugging Face's.
NAMES = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^(layers\.\d+)\.attention\.norm\.", r"model.\1.input_layernorm."),
    (r"^(layers\.\d+)\.mlp\.norm\.", r"model.\1.post_attention_layernorm."),
    (r"^(layers\.\d+)\.attention\.", r"model.\1.self_attn."),
    (r"^(layers\.\d+)\.mlp\.", r"model.\1.mlp."),
)
#: What all three have alike; all else is sizes.
PLAIN = {
    "normalization": "RMSNorm",
    "zero_centered": False,
    "norm_position": "pre",
    "parallel": False,
    "activation": "swiglu",
    "bias": False,
    "soft_cap": None,
    "scale": None,
    "fraction": 1.0,
    "scaled_embedding": False,
    "logit_cap": None,
}


def family(config: ModelConfig) -> str:
    """The model's type among Hugging Face's, or "" for one that has none of the three."""
    if (
        config.unusual
        or any(getattr(config, name) != value for name, value in PLAIN.items())
        or len(config.windows) > 1
    ):
        return ""
    if config.qk_norm is None:
        return "llama" if config.windows == (-1,) else "mistral"
    return "qwen3" if config.qk_norm == "RMSNorm" and config.windows == (-1,) else ""


def renamed(name: str, config: ModelConfig) -> str:
    """A parameter's name there; the trainer's own where there is none."""
    if not family(config):
        return name
    for pattern, replacement in NAMES:
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return name


def configuration(config: ModelConfig, vocab: int, positions: int) -> dict[str, Any]:
    """What config.json says of a model.

    Args:
        vocab: tokens that there are.
        positions: most tokens at once.
    """
    kind = family(config)
    if not kind:
        return {"model_type": "quaver", "vocab_size": padded(vocab)}
    rope = {"rope_type": "default", "rope_theta": config.theta} | dict(config.scaling)
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    shared = {
        "architectures": [names[kind]],
        "model_type": kind,
        "vocab_size": padded(vocab),
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "max_position_embeddings": positions,
        "rope_theta": config.theta,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        # Token 0 stands between texts.
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    # A window counts the query's own token there.
    return shared | ({"sliding_window": config.windows[0] + 1} if kind == "mistral" else {})
