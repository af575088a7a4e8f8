"""Logits and gradients of whole tiny models agree with transformers', from the same random weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quaver.train.model_config import MODELS, ModelConfig
from quaver.train.torch.decoder import Decoder, build_decoder
from tests.close import assert_close

VOCAB = 64
Weights = dict[str, Tensor]


def sizes(c: ModelConfig) -> dict[str, Any]:
    """What every configuration of transformers calls the same."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": c.dim,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "tie_word_embeddings": c.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.theta, "partial_rotary_factor": c.fraction},
        "attn_implementation": "eager",
        "pad_token_id": 0,
    }


def llama_like(c: ModelConfig) -> dict[str, Any]:
    grouped = {"num_key_value_heads": c.groups, "head_dim": c.head_dim}
    return {**sizes(c), **grouped, "intermediate_size": c.hidden, "rms_norm_eps": c.eps}


def falcon(c: ModelConfig) -> transformers.FalconConfig:
    return transformers.FalconConfig(**sizes(c), ffn_hidden_size=c.hidden, layer_norm_epsilon=c.eps)


def neox(c: ModelConfig) -> transformers.GPTNeoXConfig:
    more = {"intermediate_size": c.hidden, "layer_norm_eps": c.eps, "hidden_act": "gelu_fast"}
    return transformers.GPTNeoXConfig(**sizes(c), **more)


def gemma2(c: ModelConfig) -> transformers.Gemma2Config:
    assert c.scale is not None
    window = c.windows[0] + 1
    return transformers.Gemma2Config(**llama_like(c), query_pre_attn_scalar=round(c.scale**-2), sliding_window=window)


def mistral(c: ModelConfig) -> transformers.MistralConfig:
    return transformers.MistralConfig(**llama_like(c), sliding_window=c.windows[0] + 1)


LLAMA_NAMES = {
    "attention.norm": "input_layernorm",
    "attention.": "self_attn.",
    "mlp.norm": "post_attention_layernorm",
}
GEMMA_NAMES = {
    "attention.norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
FALCON_NAMES = {
    "layers.": "h.",
    "norm.": "input_layernorm.",
    "attention.o_proj": "self_attention.dense",
    "attention.qkv": "self_attention.query_key_value",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
NEOX_NAMES = {
    "attention.norm": "input_layernorm",
    "attention.o_proj": "attention.dense",
    "attention.qkv": "attention.query_key_value",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def separate(c: ModelConfig, parts: list[Tensor]) -> Tensor:
    raise AssertionError("queries, keys and values are matrices of their own")


def all_queries_first(c: ModelConfig, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


def head_by_head(c: ModelConfig, parts: list[Tensor]) -> Tensor:
    """Each head's queries, keys and values side by side."""
    return torch.cat([p.unflatten(0, (c.heads, 1, c.head_dim)) for p in parts], 1).flatten(0, 2)


#: Configuration, model, how a layer's parameters are renamed, what surrounds the layers, how q, k and v are fused.
Row = tuple[Callable[[ModelConfig], Any], Any, dict[str, str], dict[str, str], Callable[..., Tensor]]
AROUND = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layers": "model."}
FAMILIES: dict[str, Row] = {
    "llama-tiny": (
        lambda c: transformers.LlamaConfig(**llama_like(c)),
        transformers.LlamaForCausalLM,
        LLAMA_NAMES,
        AROUND,
        separate,
    ),
    "mistral-tiny": (mistral, transformers.MistralForCausalLM, LLAMA_NAMES, AROUND, separate),
    "qwen3-tiny": (
        lambda c: transformers.Qwen3Config(**llama_like(c)),
        transformers.Qwen3ForCausalLM,
        LLAMA_NAMES,
        AROUND,
        separate,
    ),
    "gemma2-tiny": (gemma2, transformers.Gemma2ForCausalLM, GEMMA_NAMES, AROUND, separate),
    "falcon-tiny": (
        falcon,
        transformers.FalconForCausalLM,
        FALCON_NAMES,
        {"embedding": "transformer.word_embeddings", "norm": "transformer.ln_f", "layers": "transformer."},
        all_queries_first,
    ),
    "gpt-neox-tiny": (
        neox,
        transformers.GPTNeoXForCausalLM,
        NEOX_NAMES,
        {
            "embedding": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "lm_head",
            "layers": "gpt_neox.",
        },
        head_by_head,
    ),
}


def translated(name: str, ours: Weights) -> Weights:
    """Our parameters, or their gradients, as transformers has them."""
    _, _, names, around, fuse = FAMILIES[name]
    config = MODELS[name]
    if fuse is not separate:
        for key in [key for key in ours if ".q_proj." in key]:
            parts = [ours[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            ours = {k: v for k, v in ours.items() if k.replace("k_proj", "q_proj").replace("v_proj", "q_proj") != key}
            ours[key.replace("q_proj", "qkv")] = fuse(config, parts)
    parameters = {}
    for key, value in ours.items():
        first, _, rest = key.partition(".")
        if first == "layers":
            number, _, part = rest.partition(".")
            old = next((old for old in names if part.startswith(old)), "")
            part = names.get(old, "") + part[len(old) :]
            parameters[f"{around['layers']}{names.get('layers.', 'layers.')}{number}.{part}"] = value
        else:
            parameters[f"{around[first]}.{rest}"] = value
    return parameters


def random_model(name: str) -> Decoder:
    """With norms and biases that do something."""
    model = build_decoder(MODELS[name], VOCAB, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_match_transformers(name: str) -> None:
    make, kind, *_ = FAMILIES[name]
    ours = random_model(name)
    theirs = kind(make(MODELS[name])).train()
    missing, unexpected = theirs.load_state_dict(translated(name, dict(ours.named_parameters())), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if MODELS[name].tied else set())
    ids = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(2))  # windows are 16
    y, expected = ours(ids), theirs(ids, use_cache=False).logits
    assert_close("logits", y, expected, 1e-5)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(g)
    expected.backward(g)
    grads = translated(name, {key: p.grad for key, p in ours.named_parameters() if p.grad is not None})
    known = dict(theirs.named_parameters())
    assert grads.keys() == known.keys()
    for key, grad in grads.items():
        assert_close(key, grad, known[key].grad, 2e-5)


def test_the_cap_and_the_window_of_gemma_2_are_tested() -> None:
    """Without them the logits would be others."""
    ours = random_model("gemma2-tiny")
    ids = torch.arange(1, 41)[None]
    for change in ({"logit_cap": None}, {"windows": (-1,)}, {"scale": None}, {"scaled_embedding": False}):
        other = build_decoder(replace(MODELS["gemma2-tiny"], **change), VOCAB, 0, torch.device("cpu"))
        other.load_state_dict(ours.state_dict())
        assert not torch.allclose(ours(ids), other(ids), rtol=1e-3)
