"""Logits and gradients of tiny models with experts, latent attention and state spaces agree with transformers',
from the same random weights."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quaver.train.model_config import MODELS, ModelConfig
from quaver.train.torch.decoder import build_decoder
from tests.close import assert_close

VOCAB = 64
LLAMA = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"\.attention\.norm\.", ".input_layernorm."),
    (r"\.mlp\.norm\.", ".post_attention_layernorm."),
    (r"\.attention\.", ".self_attn."),
    (r"\.router\.balance$", ".gate.e_score_correction_bias"),
    (r"\.router\.", ".gate."),
    (r"(\.experts\.\w+)\.weight$", r"\1"),
    (r"\.shared\.", ".shared_experts."),
    (r"\.q_down_proj\.", ".q_a_proj."),
    (r"\.q_norm\.", ".q_a_layernorm."),
    (r"\.q_up_proj\.", ".q_b_proj."),
    (r"\.kv_down_proj\.", ".kv_a_proj_with_mqa."),
    (r"\.kv_norm\.", ".kv_a_layernorm."),
    (r"\.kv_up_proj\.", ".kv_b_proj."),
    (r"^layers\.", "model.layers."),
)
MAMBA = (
    (r"^embedding\.", "backbone.embeddings."),
    (r"^norm\.", "backbone.norm_f."),
    (r"\.mixer\.norm\.", ".norm."),
    (r"\.gated_norm\.", ".norm."),
    (r"^layers\.", "backbone.layers."),
)
#: Theirs has a layer for each mixer and each MLP, ours for both: `nemotron-h-tiny` is theirs of M - M * - M -.
PARTS = ("0.mixer", "0.mlp", "1.mixer", "2.attention", "2.mlp", "3.mixer", "3.mlp")
NEMOTRON = (
    (r"^embedding\.", "model.embeddings."),
    (r"^norm\.", "model.norm_f."),
    (r"^head\.", "lm_head."),
    *((rf"^layers\.{part}\.norm\.", f"model.layers.{number}.norm.") for number, part in enumerate(PARTS)),
    *((rf"^layers\.{part}\.", f"model.layers.{number}.mixer.") for number, part in enumerate(PARTS)),
    (r"\.gated_norm\.", ".norm."),
)


def llama_like(c: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": c.dim,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.groups,
        "tie_word_embeddings": c.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.theta},
        "rms_norm_eps": c.eps,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def mixtral(c: ModelConfig) -> Any:
    e = c.experts
    assert e is not None
    own = {"num_local_experts": e.number, "num_experts_per_tok": e.chosen, "intermediate_size": e.hidden}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**llama_like(c), **own, head_dim=c.head_dim))


def deepseek(c: ModelConfig) -> Any:
    e, latent = c.experts, c.latent
    assert e is not None and latent is not None
    own = {
        "intermediate_size": c.hidden,
        "moe_intermediate_size": e.hidden,
        "n_routed_experts": e.number,
        "num_experts_per_tok": e.chosen,
        "n_shared_experts": e.shared // e.hidden,
        "n_group": e.groups,
        "topk_group": e.top_groups,
        "routed_scaling_factor": e.scale,
        "norm_topk_prob": True,
        "first_k_dense_replace": len(c.numbers("attention")),
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": False,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**llama_like(c), **own))


def mamba2(c: ModelConfig) -> Any:
    s = c.state
    assert s is not None
    config = transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=c.dim,
        num_hidden_layers=c.layers,
        num_heads=s.heads,
        head_dim=s.head_dim,
        state_size=s.state,
        n_groups=s.groups,
        conv_kernel=s.taps,
        expand=s.inner // c.dim,
        chunk_size=16,
        layer_norm_epsilon=c.eps,
        tie_word_embeddings=c.tied,
        residual_in_fp32=False,
        use_bias=False,
    )
    return transformers.Mamba2ForCausalLM(config)


def nemotron(c: ModelConfig) -> Any:
    s = c.state
    assert s is not None and c.pattern == ("state-mlp", "state", "attention", "state-mlp")
    config = transformers.NemotronHConfig(
        vocab_size=VOCAB,
        hidden_size=c.dim,
        hybrid_override_pattern="M-M*-M-",
        num_attention_heads=c.heads,
        num_key_value_heads=c.groups,
        head_dim=c.head_dim,
        intermediate_size=c.hidden,
        mamba_num_heads=s.heads,
        mamba_head_dim=s.head_dim,
        ssm_state_size=s.state,
        n_groups=s.groups,
        conv_kernel=s.taps,
        chunk_size=16,
        # Theirs limits steps to this at least, the trainer to 0.
        time_step_min=1e-30,
        layer_norm_epsilon=c.eps,
        attn_implementation="eager",
    )
    return transformers.NemotronHForCausalLM(config)


#: By name the constructor of theirs, the name of ours, and the number of layers.
ROWS: dict[str, tuple[Any, Any, int]] = {
    "mixtral-tiny": (mixtral, LLAMA, 2),
    "deepseek-tiny": (deepseek, LLAMA, 2),
    "mamba2-tiny": (mamba2, MAMBA, 2),
    "nemotron-h-tiny": (nemotron, NEMOTRON, 4),
}


def renamed(name: str, rules: Any) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


@pytest.mark.parametrize("name", ROWS)
def test_logits_and_gradients_match_transformers(name: str) -> None:
    make, rules, layers = ROWS[name]
    config = replace(MODELS[name], layers=layers)
    ours, theirs = build_decoder(config, VOCAB, 0, torch.device("cpu")), make(config).float()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in ours.named_parameters():
            if p.dim() == 1 and not key.endswith(("dt_bias", "A_log")):
                p.add_(0.1 * torch.randn(p.shape, generator=random))
    state = {renamed(key, rules): value for key, value in ours.state_dict().items()}
    problems = theirs.load_state_dict(state, strict=False)
    assert not problems.unexpected_keys and set(problems.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    ids = torch.randint(VOCAB, (2, 33), generator=random)
    outputs: list[tuple[Tensor, dict[str, Tensor]]] = []
    for model in (ours, theirs):
        logits = model(ids) if model is ours else model(ids, use_cache=False).logits
        logits.square().mean().backward()
        outputs.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert_close("logits", outputs[0][0], outputs[1][0], 2e-6)
    for key, gradient in outputs[0][1].items():
        assert_close(key, gradient, outputs[1][1][renamed(key, rules)], 1e-5)
