"""The first examples of torchao's and Transformer Engine's pages run with our names and give the documented results."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quaver.compat.torchao.float8 as float8
import quaver.compat.transformer_engine.pytorch as te
from quaver.compat.transformer_engine.common import recipe
from tests import forked
from tests.close import assert_bitwise, assert_close
from tests.compat import documented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchaos_loop_has_torchaos_outputs(name: str, dtype: torch.dtype) -> None:
    theirs: Any = pytest.importorskip("torchao.float8")
    configs = [library.Float8LinearConfig.from_recipe_name(name) for library in (float8, theirs)]
    # Without a GPU torchao computes so alone.
    object.__setattr__(configs[1], "emulate", True)
    ours, expected = (
        documented.torchao_training(library, config, dtype)
        for library, config in zip((float8, theirs), configs, strict=True)
    )
    # torchao rounds a sum to bfloat16 before it adds the bias, and again after it.
    bound = 1e-6 if dtype is torch.float32 else 6e-3
    for step, (y, z) in enumerate(zip(ours, expected, strict=True)):
        assert_close(f"step {step}", y.float(), z.float(), bound)
    assert ours[-1].sum() < ours[0].sum()


def test_torchaos_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    model, loaded, x = documented.torchao_checkpoint(float8, tmp_path / "checkpoint.pth")
    from quaver.compat.torchao.float8.float8_linear import Float8Linear

    assert [isinstance(layer, Float8Linear) for layer in loaded] == [True, False]
    assert set(loaded.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert_bitwise(loaded(x).detach(), model(x).detach())


def test_transformer_engines_first_layer() -> None:
    model, inp, out = documented.readme(te, recipe)
    assert out.shape == (256, 768) and model.weight.grad.shape == (768, 192)
    # Of a sum the gradient is one everywhere, which every format holds.
    assert_bitwise(model.bias.grad, torch.full((768,), 256.0))
    plain = torch.nn.functional.linear(inp, model.weight, model.bias)
    difference = ((out - plain).norm() / plain.norm()).item()
    assert 1e-3 < difference < 0.05


def test_transformer_engines_first_layer_for_jax() -> None:
    jax = pytest.importorskip("quaver.compat.transformer_engine.jax")
    losses = documented.readme_jax(jax, jax.flax, recipe)
    # Weights do not change, and amaxes that were never recorded are measured: every step has the same codes.
    assert len(losses) == 11 and len(set(losses[:10])) == 1
    assert 0 < abs(losses[10] - losses[0]) < 0.02 * losses[10]


@pytest.mark.parametrize("kind", ["te", "fused", "transformer"])
def test_the_quickstarts_layers_are_its_basic_layer(kind: str) -> None:
    basic, layer = documented.quickstart(te, "basic"), documented.quickstart(te, kind)
    x = torch.rand(16, 2, 128)
    layer.train()(x).sum().backward()
    # TransformerLayer is causal by default, and the basic layer is not.
    call = {"self_attn_mask_type": "no_mask"} if kind == "transformer" else {}
    assert_close("output", layer.eval()(x, **call), basic.eval()(x), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_the_quickstarts_layer_in_eight_bits(dtype: torch.dtype) -> None:
    layer = documented.quickstart(te, "transformer").to(dtype)
    fp8_recipe = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    x = torch.rand(16, 2, 128, dtype=dtype)
    torch.manual_seed(1234)
    for _ in range(3):
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            y = layer(x, attention_mask=None)
        y.backward(torch.ones_like(y))
    assert y.shape == x.shape and y.dtype == dtype
    layer.eval()
    with torch.no_grad():
        high = layer(x)
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            low = layer(x)
    difference = ((low - high).float().norm() / high.float().norm()).item()
    assert 1e-4 < difference < 0.1


def test_the_pages_run_with_their_own_import_lines(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    done = forked.bare("torch").run(
        [sys.executable, "-m", documented.__name__, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([256, 192]) torch.Size([16, 2, 128])"
