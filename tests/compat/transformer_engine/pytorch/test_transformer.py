"""Test that a layer with Transformer Engine's arguments follows its documentation and trains like ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.compat.transformer_engine.pytorch as te
import quaver.torch as qt
from quaver.compat.transformer_engine.common.recipe import MXFP8BlockScaling
from tests.close import assert_bitwise, assert_close
from tests.compat.transformer_engine.pytorch import plain
from tests.pairs import alternating

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fuse_qkv_params": True},
    "fused, not interleaved": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "Llama": {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "Llama, fused": {"num_gqa_groups": 2, "fuse_qkv_params": True, "activation": "geglu", "zero_centered_gamma": True},
    "BERT": {
        "apply_residual_connection_post_layernorm": True,
        "output_layernorm": True,
        "self_attn_mask_type": "no_mask",
    },
    "residual from the norm": {"apply_residual_connection_post_layernorm": True, "activation": "srelu"},
    "T5": {"layer_type": "decoder"},
    "T5, fused": {"layer_type": "decoder", "fuse_qkv_params": True, "apply_residual_connection_post_layernorm": True},
    "Falcon": {"parallel_attention_mlp": True, "activation": "qgelu"},
    "L2": {"qk_norm_type": "L2Normalization", "activation": "reglu"},
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    layer = te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **KINDS[kind], **more)
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return layer


def inputs(kind: str) -> dict[str, Tensor]:
    return {"encoder_output": torch.randn(7, 2, 64)} if KINDS[kind].get("layer_type") == "decoder" else {}


@EACH
def test_the_formula_matches_the_documentation(kind: str) -> None:
    layer, x, given = make(kind), torch.randn(5, 2, 64), inputs(kind)
    expected = plain.layer(layer.state_dict(), x, 4, given.get("encoder_output"), **KINDS[kind])
    assert_close("output", layer(x, **given), expected, 1e-5)


@EACH
def test_it_trains_quantized(kind: str) -> None:
    layer, x, given = make(kind), torch.randn(5, 2, 64), inputs(kind)
    with te.autocast(recipe=MXFP8BlockScaling()):
        y = layer(x, **given)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    exact = layer(x, **given)
    assert 0 < (y - exact).norm() / (exact - x).norm() < 0.1


@pytest.mark.parametrize(
    ("recipe", "fused"), alternating(["delayed", "tensorwise", "nvfp4"], [False, True], ["delayed"])
)
def test_the_bits_match_our_layer(recipe: str, fused: bool) -> None:
    """One weight for queries, keys and values, or three that each forward concatenates."""
    theirs = make("plain", fuse_qkv_params=fused, qkv_weight_interleaved=False)
    ours = qt.TransformerLayer(64, 4, 96, layout="sbhd")
    state = theirs.state_dict()
    pieces = [k for k in state if k.startswith("self_attention.layernorm_qkv.") and "layer_norm" not in k]
    joined = {kind: torch.cat([state[k] for k in pieces if k.endswith(kind)]) for kind in ("weight", "bias")}
    names = {
        "attention.norm.weight": "self_attention.layernorm_qkv.layer_norm_weight",
        "attention.norm.bias": "self_attention.layernorm_qkv.layer_norm_bias",
        "attention.o_proj.weight": "self_attention.proj.weight",
        "attention.o_proj.bias": "self_attention.proj.bias",
        "mlp.norm.weight": "layernorm_mlp.layer_norm_weight",
        "mlp.norm.bias": "layernorm_mlp.layer_norm_bias",
        "mlp.up_proj.weight": "layernorm_mlp.fc1_weight",
        "mlp.up_proj.bias": "layernorm_mlp.fc1_bias",
        "mlp.down_proj.weight": "layernorm_mlp.fc2_weight",
        "mlp.down_proj.bias": "layernorm_mlp.fc2_bias",
    }
    own = {f"attention.qkv_proj.{kind}": value for kind, value in joined.items()}
    ours.load_state_dict(own | {ours_: state[name] for ours_, name in names.items()})
    options = {"stochastic_rounding": False} if recipe == "nvfp4" else {}
    built = getattr(__import__("quaver").recipes, recipe)(**options)
    for step in range(3):
        results = []
        for layer in (theirs, ours):
            x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with qt.autocast(built):
                y = layer(x)
            y.square().sum().backward()
            results.append((y.detach(), x.grad))
        for one, other in zip(*results, strict=True):
            assert_bitwise(one, other, f"step {step}")
    assert_bitwise(theirs.layernorm_mlp.fc1_weight.grad, ours.mlp.up_proj.weight.grad)
    qkv = theirs.self_attention.layernorm_qkv
    got = qkv.weight.grad if fused else qkv.query_weight.grad
    assert_bitwise(got[:64], ours.attention.qkv_proj.weight.grad[:64])


NORMED: dict[str, Callable[..., Any]] = {
    "LayerNorm": lambda **o: te.LayerNorm(64, **o),
    "RMSNorm": lambda **o: te.RMSNorm(64, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 32, return_layernorm_output=True, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, return_layernorm_output=True, return_bias=True, **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **o),
    "BERT": lambda **o: te.TransformerLayer(64, 96, 4, hidden_dropout=0.0, output_layernorm=True, **o),
}


@pytest.mark.parametrize("name", NORMED)
def test_outputs_are_in_the_dtype_of_torchs_autocast(name: str) -> None:
    """Its modules cast their input first: all that they return, and all that backward saves of it, is as narrow."""
    recipe = MXFP8BlockScaling()
    for dtype in (torch.bfloat16, torch.float16):
        for params in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            module, x = NORMED[name](params_dtype=params), torch.randn(5, 2, 64, requires_grad=True)
            with torch.autocast("cpu", dtype), te.autocast(enabled="Norm" not in name, recipe=recipe):
                y = module(x)
            outputs = y if isinstance(y, tuple) else (y,)
            assert [t.dtype for t in outputs] == [dtype] * len(outputs)
            sum(t.float().square().sum() for t in outputs).backward()
            assert x.grad.dtype is torch.float32 and x.grad.isfinite().all()
            assert all(p.grad.dtype is params for p in module.parameters() if p.grad is not None)
    # Outside a norm computes in its weight's dtype.
    assert te.RMSNorm(64, params_dtype=torch.bfloat16)(torch.randn(5, 64)).dtype is torch.bfloat16


def test_dropout_and_drop_path_act_in_training_alone() -> None:
    layer = te.TransformerLayer(64, 96, 4, hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5)
    x = torch.randn(5, 2, 64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert_bitwise(layer(x), layer(x))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_call_says_masks_windows_and_positions(layout: str) -> None:
    layer = make("plain", attn_input_format=layout, num_gqa_groups=2)
    rope = te.RotaryPositionEmbedding(16)(16)
    x = torch.randn(2, 9, 64)
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., 6:] = True

    def run(x: Tensor, **given: Any) -> Any:
        y = layer(x if layout == "bshd" else x.transpose(0, 1), rotary_pos_emb=rope, **given)
        return y if layout == "bshd" else y.transpose(0, 1)

    whole = run(x, attention_mask=mask, self_attn_mask_type="padding_causal")
    assert_close("short", whole[1, :6], run(x[1:, :6])[0], 1e-5)
    again = run(x, attention_mask=mask, self_attn_mask_type="causal,padding", checkpoint_core_attention=True)
    assert_bitwise(again, whole)
    changed = x.clone()
    changed[:, 0] = 7
    assert_bitwise(run(changed, window_size=(1, 0))[:, 2:], run(x, window_size=(1, 0))[:, 2:])
    assert not torch.equal(run(changed)[:, 2:], run(x)[:, 2:])


def test_gradients_of_weights_wait_for_all_parts() -> None:
    layer, x = make("fused", fuse_wgrad_accumulation=False), torch.randn(5, 2, 64)
    layer(x).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    waiting = make("fused", delay_wgrad_compute=True)
    waiting(x).sum().backward()
    assert waiting.layernorm_mlp.fc1_weight.grad is None
    waiting.backward_dw()
    for p, g in zip(waiting.parameters(), expected, strict=True):
        assert_bitwise(p.grad, g)


def test_conflicting_options_give_a_clear_error() -> None:
    for options, sentence in (
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "norms before attention and MLP"),
        ({"layer_type": "encodr"}, "did you mean 'encoder'"),
        ({"activation": "gelo"}, "did you mean 'gelu'"),
        ({"tp_size": 2}, "would be one rank's shard of 2: build it unsharded"),
        ({"qk_norm_type": "L2"}, "no qk_norm_type 'L2'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            te.TransformerLayer(64, 96, 4, **options)
    with pytest.raises(TypeError, match="did you mean 'num_gqa_groups'"):
        te.TransformerLayer(64, 96, 4, num_gqa_group=2)
    with pytest.raises(TypeError, match="has no option 'return_bias'"):
        te.TransformerLayer(64, 96, 4, return_bias=True)
    with pytest.raises(TypeError, match="has no option 'core_attention_byas'; did you mean"):
        make("plain")(torch.randn(5, 2, 64), core_attention_byas=1)
