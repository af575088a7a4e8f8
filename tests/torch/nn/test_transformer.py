"""A whole layer: its formula part by part, every option under every recipe, recomputation, caches, meta device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.nn.transformer import drop_path
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs
from tests.torch.nn.pairs import assert_same_training

#: One layer of each kind.
KINDS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": {"groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False, "rope": True},
    "Gemma 2": {
        "groups": 2,
        "normalization": "RMSNorm",
        "zero_centered": True,
        "norm_position": "sandwich",
        "activation": "geglu",
        "soft_cap": 5.0,
        "window": (4, 0),
        "bias": False,
        "rope": True,
    },
    "Falcon": {"groups": 1, "parallel": True, "activation": "gelu_exact", "bias": False, "rope": True},
    "GPT-NeoX": {"parallel": "two_norms", "activation": "gelu_exact", "rope": True},
    "post-norm encoder": {"norm_position": "post", "mask_type": "none"},
    "Qwen3": {"groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "qk_norm": "RMSNorm", "rope": True},
    "gpt-oss": {"sinks": "learnable", "window": (4, 0), "activation": "clamped_swiglu", "rope": True},
    "OLMo 2": {
        "groups": 2,
        "normalization": "RMSNorm",
        "norm_position": "res_post",
        "qk_norm": "RMSNorm",
        "qk_norm_scope": "all_heads",
        "rope": True,
    },
    "Cohere's norms of heads": {"qk_norm": "LayerNorm", "qk_norm_scope": "each_head", "norm_bias": False, "rope": True},
    "Llama 4": {"normalization": "RMSNorm", "chunk": 4, "rope": True, "qk_norm": "L2", "qk_norm_after_rope": True},
    "Llama 4 without rope": {"groups": 2, "normalization": "RMSNorm", "temperature": (0.3, 2)},
    "Whisper": {"mask_type": "none", "key_bias": False, "fused": False, "activation": "gelu_exact"},
    "T5": {"normalization": "RMSNorm", "mask_type": "none", "scale": 1.0, "bias": False, "position_bias": True},
    "DeepSeek-V3": {
        "normalization": "RMSNorm",
        "bias": False,
        "activation": "swiglu",
        "latent": qt.LatentConfig(q_rank=24, kv_rank=32, plain_dim=8, rope_dim=16, value_dim=12),
        "rope": True,
    },
    "DeepSeek-V2 Lite": {"latent": qt.LatentConfig(kv_rank=32, plain_dim=8, rope_dim=16, value_dim=12), "rope": True},
    "BLOOM's residual": {"residual_from_norm": True, "alibi": True},
    "ALiBi": {"alibi": True, "residual_scale": 0.5, "fused": False},
    "decoder with memory": {"cross_attention": True, "memory_dim": 24},
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **options: Any) -> qt.TransformerLayer:
    given = {**KINDS[kind], **options}
    if given.pop("rope", False):
        given["rope"] = qt.RotaryEmbedding(16, device=given.get("device"))
    if given.pop("position_bias", False):
        given["position_bias"] = qt.RelativePositionBias(4, 8, 6, device=given.get("device"))
    layer = qt.TransformerLayer(64, 4, 96, **given)
    if given.get("device") != "meta":
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "norm" in name or name.endswith(("bias", "sinks")):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


#: The encoder output [B, S, D] that cross attention reads.
MEMORY = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(5))


def memory_of(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return (MEMORY.to(dtype),) if kind == "decoder with memory" else ()


def run(layer: Any, x: Tensor) -> Tensor:
    return layer(x, *(() if layer.cross_attention is None else memory_of("decoder with memory", x.dtype)))


def composed(layer: Any, x: Tensor) -> Tensor:
    """The formulas of the docstring, with each submodule called separately."""
    memory = memory_of("decoder with memory") if layer.cross_attention is not None else ()
    s = layer.residual_scale
    if layer.parallel:
        h = layer.norm(x) if layer.norm is not None else x
        return x + s * (layer.attention(h) + layer.mlp(h))
    parts = [("attention", layer.attention), ("mlp", layer.mlp)]
    if memory:
        parts.insert(1, ("cross_attention", lambda h: layer.cross_attention(h, *memory)))
    for name, part in parts:
        after = getattr(layer, f"{name}_post_norm")
        if layer.norm_position in ("sandwich", "res_post"):
            x = x + s * after(part(x))
        elif layer.norm_position == "post":
            x = after(x + s * part(x))
        elif layer.residual_from_norm:
            x = part.norm(x) + s * part(x)[0]  # type: ignore[union-attr]
        else:
            x = x + s * part(x)
    return x


@EACH
def test_the_formula(kind: str) -> None:
    layer, x = make(kind), torch.randn(2, 9, 64)
    assert_close("output", run(layer, x), composed(layer, x), 1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype", "recipe"), pairs(KINDS, [torch.float32, torch.bfloat16, torch.float16], recipes.RECIPES)
)
def test_every_kind_trains_under_every_recipe(kind: str, dtype: torch.dtype, recipe: str) -> None:
    layer = make(kind, dtype=dtype)
    x = torch.randn(2, 9, 64).to(dtype).requires_grad_()
    with torch.no_grad():
        exact = run(layer.float(), x.float())
    layer.to(dtype)
    with qt.autocast(recipe):
        y = run(layer, x)
    y.float().square().sum().backward()
    error = (y.float() - exact).norm() / (exact - x.float()).norm()
    bound = 0.35 if recipe in ("nvfp4", "mxfp4") else 0.12 if recipes.get(recipe).quantizes else 0.02
    assert y.dtype == dtype and error < bound, f"error {error:.3f} of what the layer adds"
    for name, parameter in [*layer.named_parameters(), ("x", x)]:
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # The gradient of a key's bias is 0: softmax does not see what is added to all keys alike.
        assert parameter.grad.abs().sum() > 0 or "k_proj.bias" in name, name


@pytest.mark.parametrize(
    ("kind", "recipe", "recompute"), pairs(KINDS, ["delayed", "tensorwise", "nvfp4"], ["mlp", "full"])
)
def test_recomputing_changes_no_bit(kind: str, recipe: str, recompute: str) -> None:
    def again(layer: Any, x: Tensor) -> Tensor:
        layer.recompute, layer.mlp.recompute = recompute, recompute == "mlp"
        return run(layer, x)

    inputs = [torch.randn(2, 9, 64) * (i + 1) for i in range(2)]
    assert_same_training(make(kind), [run, again], recipe, inputs)


def test_recomputing_repeats_the_dropout() -> None:
    runs = []
    for recompute in (None, "full"):
        torch.manual_seed(0)
        layer = make("Llama", dropout=0.3, attention_dropout=0.2, drop_path=0.2, recompute=recompute)
        x = torch.randn(4, 9, 64, requires_grad=True)
        torch.manual_seed(1)
        with qt.autocast("mxfp8"):
            layer(x).sum().backward()
        runs.append([x.grad, *(p.grad for p in layer.parameters())])
    for plain, again in zip(*runs, strict=True):
        assert_bitwise(again, plain)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
@pytest.mark.parametrize("kind", ["Llama", "Gemma 2", "Falcon", "gpt-oss"])
def test_layouts_agree(kind: str, layout: str) -> None:
    layer, x = make(kind), torch.randn(3, 9, 64)
    other = copy.deepcopy(layer)
    other.layout = other.attention.layout = other.attention.core.layout = layout
    if layout == "sbhd":
        y = other(x.transpose(0, 1)).transpose(0, 1)
    else:
        y = other(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 9, 18, 27])).view(3, 9, 64)
    assert_close("output", y, layer(x), 1e-6)


def test_padding_is_hidden() -> None:
    layer, x = make("Llama", mask_type="padding_causal"), torch.randn(2, 9, 64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 6:] = True
    changed = x.clone()
    changed[0, 6:] = 7
    assert_bitwise(layer(changed, mask=mask)[~mask], layer(x, mask=mask)[~mask])


def test_drop_path_leaves_out_whole_samples() -> None:
    x = torch.ones(4000, 3)
    y = drop_path(x, 0.25)
    assert_close("what stays", y.unique(), torch.tensor([0.0, 4 / 3]), 1e-6)
    assert (y == y[:, :1]).all() and abs(float((y[:, 0] == 0).float().mean()) - 0.25) < 0.03
    assert (drop_path(torch.ones(3, 4000), 0.25, 1) == drop_path(torch.ones(1, 4000), 0.0, 1)).shape == (3, 4000)
    layer = make("GPT", drop_path=0.5, dropout=0.5).eval()
    inputs = torch.randn(2, 5, 64)
    assert_bitwise(layer(inputs), layer(inputs))


@EACH
def test_meta_device_is_filled_later(kind: str) -> None:
    layer = make(kind, device="meta")
    assert all(p.is_meta for p in layer.parameters())
    if kind != "decoder with memory":
        with qt.autocast("mxfp8"):
            assert layer(torch.empty(2, 5, 64, device="meta")).shape == (2, 5, 64)
    layer.to_empty(device="cpu").reset_parameters()
    with qt.autocast("delayed"):
        assert run(layer, torch.randn(2, 5, 64)).isfinite().all()
    other = make(kind, device="meta")
    filled = make(kind)
    other.load_state_dict(filled.state_dict(), assign=True)
    x = torch.randn(2, 5, 64)
    assert_bitwise(run(other, x), run(filled, x))


def test_bad_input_gives_a_clear_error() -> None:
    for options, sentence in (
        ({"norm_position": "pree"}, "did you mean 'pre'"),
        ({"parallel": "both"}, "give False, True"),
        ({"parallel": True, "cross_attention": True}, "requires norm_position 'pre' and no cross attention"),
        ({"recompute": "all"}, "give None, 'mlp' or 'full'"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"drop_path": 0.1, "layout": "thd"}, "no batch axis"),
        ({"cross_attention": True, "layout": "thd"}, "sequences of equal length"),
        ({"normalization": "RMS"}, "no normalization 'RMS'"),
        ({"residual_from_norm": True, "parallel": True}, "leave norm_position, parallel and latent out"),
    ):
        with pytest.raises(ValueError, match=sentence):
            qt.TransformerLayer(64, 4, 96, **options)
    with pytest.raises(ValueError, match="needs a memory"):
        make("decoder with memory")(torch.randn(2, 5, 64))
    with pytest.raises(ValueError, match="give no memory"):
        make("GPT")(torch.randn(2, 5, 64), torch.randn(2, 5, 64))
    with pytest.raises(ValueError, match="latent attention cannot override window for one call"):
        make("DeepSeek-V3")(torch.randn(2, 5, 64), window=(1, 0))


@pytest.mark.parametrize("kind", ["GPT", "Llama", "Gemma 2", "BLOOM's residual"])
def test_options_of_one_call_equal_options_of_the_layer(kind: str) -> None:
    """Mask type, window and rope, on a layer that was made with others; and the layer's own again after that."""
    rope = qt.RotaryEmbedding(16, theta=50.0)
    options = {**KINDS[kind], "rope": False}
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 7:] = True
    x = torch.randn(2, 9, 64)
    for overrides in (
        {"mask_type": "none", "window": (-1, -1)},
        {"mask_type": "padding", "window": (2, 3)},
        {"window": (2, 0)},
        {"window": (-1, -1)},
    ):
        layer = make(kind)
        own = layer(x)
        other = qt.TransformerLayer(64, 4, 96, **{**options, **overrides, "rope": rope})  # type: ignore[arg-type]
        other.load_state_dict(layer.state_dict())
        padded = {"mask": mask} if overrides.get("mask_type") == "padding" else {}
        y = layer(x, rope=rope, **padded, **overrides)  # type: ignore[arg-type]
        assert_bitwise(y, other(x, **padded))
        assert not torch.equal(y, own)
        assert_bitwise(layer(x), own)
        with qt.autocast("mxfp8"):
            (g,) = torch.autograd.grad(layer(x, rope=rope, **padded, **overrides).sum(), layer.mlp.down_proj.weight)  # type: ignore[arg-type]
            (h,) = torch.autograd.grad(other(x, **padded).sum(), other.mlp.down_proj.weight)
        assert_bitwise(g, h)


def test_a_memory_is_masked_as_one_call_says() -> None:
    layer, x = make("decoder with memory"), torch.randn(2, 9, 64)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 3:] = True
    y = layer(x, MEMORY, memory_mask=(torch.zeros(2, 9, dtype=torch.bool), mask), mask_type=(None, "padding"))
    assert_close("output", y, layer(x, MEMORY[:, :3]), 1e-6)
