"""Test layers of transformers loaded into ours: outputs, gradients, bf16, sharing, decoding, errors."""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

import quaver.torch as qt
from quaver.torch.conversion.huggingface.call import arguments, surroundings
from quaver.torch.conversion.huggingface.roles import distance
from tests.close import assert_bitwise

DIM, TOKENS = 32, 11
NONE = ("pad_token_id", "bos_token_id", "eos_token_id")
SIZES: dict[str, Any] = dict.fromkeys(NONE) | {
    **{"hidden_size": DIM, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "vocab_size": 8, "max_position_embeddings": 64, "attn_implementation": "eager"},
}
OF_HEADS = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
FALCON = {k: v for k, v in OF_HEADS.items() if k != "intermediate_size"} | {"ffn_hidden_size": 48}
T5 = {"d_model": DIM, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2, "vocab_size": 8}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9, "attn_implementation": "eager"}
WHISPER = {"d_model": DIM, "attn_implementation": "eager"}
WHISPER |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")} | {"encoder_ffn_dim": 48}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
TWO = ["sliding_attention", "full_attention"]

MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = OF_HEADS | {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}
MLA |= {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"mscale": 1.0, "mscale_all_dim": 0.8}

#: The configuration class, its options besides sizes, the layer, and its index in the model.
LAYERS: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "llama": ("LlamaConfig", SIZES, "LlamaDecoderLayer", 0),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 4}, "MistralDecoderLayer", 0),
    "qwen2": ("Qwen2Config", SIZES, "Qwen2DecoderLayer", 0),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}, "Qwen3DecoderLayer", 0),
    "gemma2": (
        "Gemma2Config",
        SIZES | {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "sliding_window": 4},
        "Gemma2DecoderLayer",
        0,
    ),
    "gemma3": (
        "Gemma3TextConfig",
        SIZES | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4, "layer_types": TWO},
        "Gemma3DecoderLayer",
        0,
    ),
    "phi": ("PhiConfig", OF_HEADS | {"rope_parameters": PARTIAL, "qk_layernorm": True}, "PhiDecoderLayer", 0),
    "phi3": ("Phi3Config", SIZES, "Phi3DecoderLayer", 0),
    "gpt_neox": ("GPTNeoXConfig", OF_HEADS | {"rope_parameters": PARTIAL}, "GPTNeoXLayer", 0),
    "gpt_neox, one after the other": ("GPTNeoXConfig", OF_HEADS | {"use_parallel_residual": False}, "GPTNeoXLayer", 0),
    "falcon": ("FalconConfig", FALCON, "FalconDecoderLayer", 0),
    "falcon 40b": (
        "FalconConfig",
        FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True},
        "FalconDecoderLayer",
        0,
    ),
    "gpt2": ("GPT2Config", {"n_embd": DIM, "n_head": 4, "n_inner": 48, "attn_implementation": "eager"}, "GPT2Block", 0),
    "mpt": (
        "MptConfig",
        {"d_model": DIM, "n_heads": 4, "max_seq_len": 64, "attn_implementation": "eager"},
        "MptBlock",
        0,
    ),
    "olmo2": ("Olmo2Config", SIZES, "Olmo2DecoderLayer", 0),
    "exaone4": ("Exaone4Config", SIZES | {"sliding_window": 4, "layer_types": TWO}, "Exaone4DecoderLayer", 0),
    "exaone4, no rope": ("Exaone4Config", SIZES | {"sliding_window": 4, "layer_types": TWO}, "Exaone4DecoderLayer", 1),
    "llama4": (
        "Llama4TextConfig",
        SIZES
        | {"head_dim": 8, "intermediate_size_mlp": 48, "use_qk_norm": True, "attention_chunk_size": 4}
        | {"interleave_moe_layer_step": 2},
        "Llama4TextDecoderLayer",
        0,
    ),
    "llama4, no rope, mixture": (
        "Llama4TextConfig",
        SIZES
        | {
            "head_dim": 8,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 3,
            "attn_scale": 0.4,
        }
        | {"num_local_experts": 4, "interleave_moe_layer_step": 1},
        "Llama4TextDecoderLayer",
        1,
    ),
    "deepseek_v3": ("DeepseekV3Config", MLA, "DeepseekV3DecoderLayer", 0),
    "deepseek_v3, mixture": (
        "DeepseekV3Config",
        MLA | {"q_lora_rank": None, "attention_bias": True, "rope_parameters": YARN, "rope_interleave": False},
        "DeepseekV3DecoderLayer",
        1,
    ),
    "gpt_oss": (
        "GptOssConfig",
        SIZES
        | {"head_dim": 16, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "GptOssDecoderLayer",
        0,
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4}, "MixtralDecoderLayer", 0),
    "qwen3_moe": ("Qwen3MoeConfig", MOE | {"head_dim": 8, "norm_topk_prob": True}, "Qwen3MoeDecoderLayer", 0),
    "olmoe": ("OlmoeConfig", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}, "OlmoeDecoderLayer", 0),
    "qwen2_moe": ("Qwen2MoeConfig", MOE | {"shared_expert_intermediate_size": 40}, "Qwen2MoeDecoderLayer", 0),
    "whisper": ("WhisperConfig", WHISPER, "WhisperEncoderLayer", 0),
    "bert": ("BertConfig", OF_HEADS, "BertLayer", 0),
    "t5": ("T5Config", T5, "T5Block", 0),
    "t5, gated": ("T5Config", T5 | {"feed_forward_proj": "gated-gelu"}, "T5Block", 1),
    "cohere": ("CohereConfig", SIZES | {"use_qk_norm": True}, "CohereDecoderLayer", 0),
    "granite": (
        "GraniteConfig",
        SIZES | {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
        "GraniteDecoderLayer",
        0,
    ),
}
#: Layers that become a mixture of ours.
MIXTURES = ("deepseek_v3, mixture", "gpt_oss", "mixtral", "qwen3_moe", "olmoe", "qwen2_moe")
#: Where the derivative is discontinuous, rounding changes gradients by chance.
JUMPS = ("t5", "llama4, no rope, mixture", *MIXTURES)


def layer_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A transformers layer with random parameters, and the arguments to load it."""
    config_class, options, layer_class, index = LAYERS[name]
    config = getattr(transformers, config_class)(**options)
    module = inspect.getmodule(getattr(transformers, config_class)).__name__.replace("configuration", "modeling")  # type: ignore[union-attr]
    more = {"has_relative_attention_bias": name == "t5"} if layer_class == "T5Block" else {}
    numbered = {} if name == "whisper" else {"layer_idx": index}
    theirs = getattr(importlib.import_module(module), layer_class)(config, **more, **numbered)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    read = {"dropout": 0.0, "attention_dropout": 0.0}
    return theirs.eval(), read | ({"config": config, "mask_type": "causal"} if name == "mpt" else {})


def arguments_for_theirs(theirs: Any, read: dict[str, Any], x: Tensor, mask: str) -> dict[str, Any]:
    """Arguments of the transformers layer: its own mask, with padding on either side, or an arbitrary one."""
    around = surroundings(theirs, read.get("config"), True if "mask_type" in read else None)
    given = arguments(theirs, around, x)
    if mask == "arbitrary":
        return given | {"attention_mask": torch.where(arbitrary(), torch.finfo(x.dtype).min, 0.0)}
    if mask.endswith("padding"):
        kinds = {"sliding_attention": "sliding_window_causal", "chunked_attention": "chunked_causal"}
        kind = kinds.get(around.kind, "causal") if around.causal else "bidirectional"
        make = getattr(masking_utils, f"create_{kind}_mask")
        more = {"past_key_values": None} if around.causal else {}
        theirs_mask = make(config=around.config, inputs_embeds=x, attention_mask=(~padding(mask)).long(), **more)
        return given | {"attention_mask": theirs_mask.bool() if "position_bias" in given else theirs_mask}
    return given


def padding(side: str) -> Tensor:
    """bool [B, S], True where padded."""
    right = torch.arange(TOKENS) >= TOKENS - torch.tensor([0, 4])[:, None]
    return right.flip(1) if side.startswith("left") else right


def arbitrary() -> Tensor:
    """bool [B, 1, S, S], True where hidden; each query sees itself."""
    hidden = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.5
    return hidden & ~torch.eye(TOKENS, dtype=torch.bool)


def run(layer: Any, x: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The output and the gradient of x; parameters hold their own gradients."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, **options)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(g)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def gradients(theirs: Any, read: dict[str, Any], fused: bool | None) -> dict[str, Tensor]:
    """Gradients of their layer in our order, obtained by loading it again."""
    other = copy.deepcopy(theirs)
    for p, q in zip(other.parameters(), theirs.parameters(), strict=True):
        p.data = torch.zeros_like(q) if q.grad is None else q.grad.clone()
    return {n: p.detach() for n, p in qt.from_huggingface(other, fused=fused, **read).named_parameters()}


def masks() -> list[Any]:
    """Every layer with its own mask and, by turns, with padding on one side or an arbitrary mask.

    MPT's bias depends only on key positions, which equals ALiBi for causal layers only.
    """
    turns = ("right padding", "arbitrary", "left padding")
    rows = [(name, turns[number % 3]) for number, name in enumerate(LAYERS) if name != "mpt"]
    return [*((name, "own") for name in LAYERS), *rows, ("mpt", "right padding"), ("llama", "arbitrary")]


@pytest.mark.parametrize(("name", "mask"), masks())
def test_outputs_and_gradients_match_transformers(name: str, mask: str) -> None:
    (theirs, read), padded = layer_of(name), mask.endswith("padding")
    fused = name != "whisper" or None if mask == "arbitrary" else False if padded else None
    x, g = torch.randn(2, TOKENS, DIM), torch.randn(2, TOKENS, DIM)
    real = (~padding(mask))[..., None].float() if padded else torch.ones(2, TOKENS, 1)
    expected = run(theirs, x, g * real, **arguments_for_theirs(theirs, read, x, mask))
    want = gradients(theirs, read, fused)
    causal = surroundings(theirs, read.get("config"), True if "mask_type" in read else None).causal
    ours: Any = qt.from_huggingface(theirs, fused=fused, **{**read, "mask_type": read.get("mask_type")})
    core = ours.attention.core
    if padded:
        core.mask_type = "padding_causal" if causal else "padding"
    elif mask == "arbitrary":
        core.mask_type, core.window, core.chunk = "arbitrary", None, None
    hidden = {} if mask == "own" else {"mask": padding(mask) if padded else arbitrary()}
    got = run(ours, x, g * real, **hidden)
    assert distance(got[0] * real, expected[0] * real) <= 1e-5
    assert distance(got[1], expected[1]) <= 1e-5
    largest = max(float(w.abs().max()) for w in want.values())
    for parameter, p in ours.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        # Without rope, the gradient of a key's bias is 0 up to rounding.
        off = float((grad - want[parameter]).abs().max()) / max(float(want[parameter].abs().max()), 1e-2 * largest)
        assert off <= 1e-5, f"gradient of {parameter}: {off:.1e}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i % 3 else []) for i, name in enumerate(LAYERS)]
)
def test_bf16_results_are_as_close_to_float32_as_theirs(name: str) -> None:
    theirs, read = layer_of(name)
    for p in theirs.parameters():
        p.data.mul_(0.7)
    low = copy.deepcopy(theirs).bfloat16()
    exact, ours = copy.deepcopy(low).float(), qt.from_huggingface(low, **read)
    x, g = torch.randn(8, TOKENS, DIM).bfloat16(), torch.randn(8, TOKENS, DIM).bfloat16()
    want = run(exact, x.float(), g.float(), **arguments_for_theirs(exact, read, x.float(), "own"))
    their = run(low, x, g, **arguments_for_theirs(low, read, x, "own"))
    for i, (a, b, c) in enumerate(zip(run(ours, x, g), their, want, strict=True)):
        if i and name in JUMPS:
            continue
        assert float((a.float() - c).norm()) <= 1.1 * float((b.float() - c).norm()), ("output", "gradient of x")[i]


def test_parameters_are_shared_where_both_layers_store_them_the_same_way() -> None:
    copies = {
        "gpt_neox": {"attention.qkv_proj.weight", "attention.qkv_proj.bias"},
        "falcon 40b": {"attention.qkv_proj.weight"},
        "gpt2": {f"{n}.weight" for n in ("attention.qkv_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj")},
    }
    for name in ("llama", "phi3", "olmo2", "gemma3", "bert", "t5", *MIXTURES, *copies):
        theirs, read = layer_of(name)
        own = {id(p) for p in theirs.parameters()}
        before = {n: p.clone() for n, p in theirs.named_parameters()}
        ours: Any = qt.from_huggingface(theirs.train(), **read)
        assert isinstance(ours.mlp, qt.MoE) is (name in MIXTURES)
        assert {n for n, p in ours.named_parameters() if id(p) not in own} == copies.get(name, set()), name
        assert (
            ours.training
            and theirs.training
            and sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
        )
        for n, p in theirs.named_parameters():
            assert_bitwise(p.detach(), before[n])
    state = qt.from_huggingface(layer_of("llama")[0], fused=True).state_dict()
    assert {"attention.qkv_proj.weight", "mlp.gate_up_proj.weight"} <= state.keys()


def changed(method: str, of: Callable[[Any], Any], what: Callable[[Tensor], Tensor]) -> Any:
    """A Llama layer in which one submodule computes something else."""
    theirs, _ = layer_of("llama")
    part = of(theirs)
    kind = type(part)
    forward = getattr(kind, method)

    @functools.wraps(forward)
    def other(self: Any, *args: Any, **options: Any) -> Any:
        y = forward(self, *args, **options)
        return (what(y[0]), *y[1:]) if isinstance(y, tuple) else what(y)

    part.__class__ = type(kind.__name__, (kind,), {method: other, "__module__": kind.__module__})
    return theirs


def test_unsupported_parts_are_refused_by_name() -> None:
    for of, message in (
        (lambda layer: layer.input_layernorm, "LlamaRMSNorm has other outputs than LayerNorm, RMSNorm and L2"),
        (
            lambda layer: layer.self_attn.k_proj,
            "the layer's attention has other outputs than Quaver's with any options",
        ),
        (lambda layer: layer.mlp.act_fn, "the layer's MLP has other outputs"),
        (lambda layer: layer, "the layer has other outputs for every placement of the norms: they differ by 9.9e-03"),
    ):
        with pytest.raises(ValueError, match=message):
            qt.from_huggingface(changed("forward", of, lambda y: y * 1.01))


def test_bad_input_gives_a_clear_error() -> None:
    llama, bert = layer_of("llama")[0], layer_of("bert")[0]
    converted = layer_of("llama")[0]
    qt.convert(nn.ModuleList([converted]), "tensorwise")
    decoder = importlib.import_module("transformers.models.t5.modeling_t5").T5Block(
        transformers.T5Config(**T5, is_decoder=True), layer_idx=0
    )
    t5 = importlib.import_module("transformers.models.t5.modeling_t5").T5Block(transformers.T5Config(**T5))
    inside: Any = copy.deepcopy(layer_of("whisper")[0])
    inside.activation_dropout = 0.1
    between: Any = copy.deepcopy(layer_of("whisper")[0])
    between.activation_fn = nn.Sequential(between.activation_fn, nn.Dropout(0.1))
    no_bias: Any = copy.deepcopy(layer_of("mpt")[0])
    # As if the module no longer had the function that builds ALiBi's bias.
    no_bias.__class__ = type("Block", (type(no_bias),), {"__module__": __name__})
    clipped: Any = copy.deepcopy(layer_of("mpt")[0])
    clipped.attn.clip_qkv = 8.0
    falcon = transformers.models.falcon.modeling_falcon.FalconDecoderLayer(
        transformers.FalconConfig(**FALCON, alibi=True), 0
    )
    for layer, options, message in (
        (nn.Linear(4, 4), {}, "Linear has no transformers configuration"),
        (layer_of("mpt")[0], {"mask_type": "causal", "dropout": 0.0, "attention_dropout": 0.0}, "config=model.config"),
        (
            layer_of("mpt")[0],
            {"config": layer_of("mpt")[1]["config"]},
            "has no attribute that says if it is causal: give mask_type=",
        ),
        (copy.deepcopy(llama).to("meta"), {}, "has no parameter values, so its outputs cannot be compared"),
        (converted, {}, "is already converted; call quaver.torch.revert first"),
        (bert, {}, r"has dropout \(attention.self.dropout = 0.1.*pass dropout="),
        (decoder, {"dropout": 0.0, "attention_dropout": 0.0}, "EncDecAttention is cross attention"),
        (falcon, {"dropout": 0.0, "attention_dropout": 0.0}, "receives ALiBi's bias"),
        (clipped, {"mask_type": "causal", "config": layer_of("mpt")[1]["config"]}, r"clamps .* to ±8 \(clip_qkv\)"),
        (inside, {"dropout": 0.1, "attention_dropout": 0.0}, r"between the matrices of its MLP \(activation_dropout"),
        (
            between,
            {"dropout": 0.1, "attention_dropout": 0.0},
            r"between the matrices of its MLP \(activation_fn\.1 = 0\.1",
        ),
        (no_bias, layer_of("mpt")[1], "its file has no build_mpt_alibi_tensor; create a TransformerLayer"),
        (t5, {"dropout": 0.1, "attention_dropout": 0.0}, r"between the matrices of its MLP \(layer.1.DenseRelu"),
        (llama, {"mask_type": "casual"}, "did you mean 'causal'"),
        (llama, {"mask_type": "arbitrary"}, "does not determine if the layer is causal"),
        (
            layer_of("whisper")[0],
            {"dropout": 0.0, "attention_dropout": 0.0, "fused": True},
            "requires separate matrices: fused=False",
        ),
        (llama.self_attn, {}, "has no attention and MLP with known names"),
    ):
        with pytest.raises(ValueError, match=message):
            qt.from_huggingface(layer, **options)


def test_a_layer_is_recognized_by_its_structure_not_its_class_name() -> None:
    theirs, read = layer_of("mpt")
    theirs.__class__ = type("Renamed", (type(theirs),), {"__module__": type(theirs).__module__})
    assert qt.from_huggingface(theirs, **read).attention.core.alibi is not None


def test_bfloat16_layers_where_rounding_changes_the_routing_are_converted() -> None:
    options = MOE | {"num_experts": 64, "num_experts_per_tok": 8}
    for seed in range(3):
        torch.manual_seed(seed)
        layer = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**options)).model.layers[0]
        for p in layer.parameters():
            nn.init.normal_(p, std=0.3)
        ours: Any = qt.from_huggingface(layer.bfloat16())
        assert isinstance(ours.mlp, qt.MoE) and ours.mlp.mixture.k == 8


def test_unsupported_mixtures_stay_unchanged() -> None:
    llama4, read = layer_of("llama4, no rope, mixture")
    ours: Any = qt.from_huggingface(llama4, **read)
    assert ours.mlp.module is llama4.feed_forward
    config = transformers.MixtralConfig(**SIZES | {"num_local_experts": 4, "router_jitter_noise": 0.1})
    layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0]
    ours = qt.from_huggingface(layer)
    assert ours.mlp.module is layer.mlp


def test_a_recipe_applies_to_experts_and_not_the_router() -> None:
    theirs, read = layer_of("qwen2_moe")
    ours: Any = qt.from_huggingface(theirs, **read)
    report = qt.convert(ours.mlp, "mxfp8")
    shared = {f"shared.{name}_proj" for name in ("gate", "up", "down")}
    assert set(report.converted) == {"experts.gate_up_proj", "experts.down_proj", *shared}
