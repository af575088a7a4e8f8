"""Mixtures of experts of Hugging Face's transformers, and ours of the same parameters: outputs and every gradient."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.recipes.spec import Recipe
from tests.close import assert_close

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
#: By name: the configuration's class, and what it is told; and what ours must have read.
LAYERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4}, {"experts": 4, "k": 2}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
        # Its softmax over all, divided by the sum of the chosen, is one over these.
        {"softmax_first": False},
    ),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 4}, {"softmax_first": True, "normalize": False}),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        DEEPSEEK,
        {"scores": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "balance_bias": True, "shared": 24},
    ),
    "gpt_oss": (
        hf.GptOssConfig,
        {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
        {"router_bias": True, "layout": "kn", "interleaved": True},
    ),
    "qwen2_moe": (
        hf.Qwen2MoeConfig,
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        {"softmax_first": True, "shared": 40, "shared_gate": True},
    ),
}


def layer_of(name: str) -> Any:
    """A decoder layer with drawn parameters, and a correction that chooses."""
    kind, options, _ = LAYERS[name]
    torch.manual_seed(0)
    layer = hf.AutoModelForCausalLM.from_config(kind(**COMMON | options)).model.layers[0]
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else p.normal_(mean=1.0, std=0.1)
        for key, buffer in layer.named_buffers():
            if "correction" in key:
                buffer.normal_(std=0.1)
    return layer


def mixture_of(layer: Any) -> nn.Module:
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def gradients(run: Any, parameters: dict[str, nn.Parameter], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `run` gives of x, and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = run(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    of = torch.autograd.grad(y, [x, *parameters.values()], g)
    return {"output": y, "input": of[0]} | dict(zip(parameters, of[1:], strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_all_gradients_match_transformers(name: str) -> None:
    layer = layer_of(name)
    before = dict(layer.named_parameters())
    ours: Any = qt.from_huggingface(layer, dropout=0.0, attention_dropout=0.0)
    moe, theirs = ours.mlp, mixture_of(layer)
    assert isinstance(moe, qt.MoE)
    for option, value in LAYERS[name][2].items():
        assert getattr(moe.mixture, option) == value, option
    parameters = dict(theirs.named_parameters())
    # The very same objects, none left out.
    own = {id(p) for p in moe.parameters()} - {id(p) for p in moe.norm.parameters()}
    assert own == {id(p) for p in parameters.values()} and dict(layer.named_parameters()) == before
    x = torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(1))

    def first(x: torch.Tensor) -> torch.Tensor:
        y = theirs(x)
        return y[0] if isinstance(y, tuple) else y

    def without_norm(x: torch.Tensor) -> torch.Tensor:
        norm, moe.norm = moe.norm, None
        y: torch.Tensor = moe(x)
        moe.norm = norm
        return y

    expected = gradients(first, parameters, x)
    for key, value in gradients(without_norm, parameters, x).items():
        assert_close(f"{name} {key}", value, expected[key], 1e-6)


def test_bfloat16_layers_where_rounding_changes_the_routing_are_converted() -> None:
    kind, options, _ = LAYERS["qwen3_moe"]
    for seed in range(3):
        torch.manual_seed(seed)
        config = kind(**COMMON | options | {"num_experts": 64, "num_experts_per_tok": 8})
        layer = hf.AutoModelForCausalLM.from_config(config).model.layers[0]
        with torch.no_grad():
            for p in layer.parameters():
                p.normal_(std=0.3) if p.dim() > 1 else p.normal_(mean=1.0, std=0.1)
        ours: Any = qt.from_huggingface(layer.bfloat16())
        assert isinstance(ours.mlp, qt.MoE) and ours.mlp.mixture.k == 8


@pytest.mark.parametrize("recipe", [name for name, build in RECIPES.items() if build().quantizes])
def test_layers_of_transformers_train_under_every_recipe(recipe: str) -> None:
    ours: Any = qt.from_huggingface(layer_of("mixtral"))
    # Delayed scaling begins with what a first step has measured.
    for _ in range(2):
        with qt.autocast(recipe):
            y = ours(torch.randn(2, 24, 32))
        y.square().mean().backward()
    # Eight and four bits of small random layers are off by so much.
    assert y.isfinite().all()
    for key, p in ours.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key


def test_unsupported_modules_stay_unchanged() -> None:
    torch.manual_seed(0)
    config = hf.Llama4TextConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48}
    )
    layer = hf.AutoModelForCausalLM.from_config(config).model.layers[0]
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.3)
    ours: Any = qt.from_huggingface(layer)
    assert ours.mlp.module is layer.feed_forward
    jittered = hf.AutoModelForCausalLM.from_config(hf.MixtralConfig(**COMMON | {"router_jitter_noise": 0.1}))
    noisy: Any = qt.from_huggingface(jittered.model.layers[0])
    assert noisy.mlp.module is mixture_of(jittered.model.layers[0])


def test_the_given_recipe_applies_to_experts_and_not_the_router() -> None:
    ours: Any = qt.from_huggingface(layer_of("qwen2_moe"))
    qt.convert(ours, "mxfp8")
    recipes = {name: module.recipe for name, module in ours.mlp.named_modules() if hasattr(module, "recipe")}
    assert {name for name, recipe in recipes.items() if isinstance(recipe, Recipe)} == {
        "experts.gate_up_proj",
        "experts.down_proj",
        "shared.gate_proj",
        "shared.up_proj",
        "shared.down_proj",
    }
