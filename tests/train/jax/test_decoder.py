"""The decoder of JAX compared with that of PyTorch, with the same weights and batches."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.recipes
import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.train import compare_runs, run_training
from quaver.train.config import TrainConfig
from quaver.train.data import training_batch
from quaver.train.jax.learner import gradients, ignore, logits_of, norm
from quaver.train.model_config import MODELS
from quaver.train.torch.decoder import loss_of
from tests.close import assert_close
from tests.train.conftest import MakeConfig
from tests.train.jax.pairs_of_learners import TOKENS, pair

TINY = [name for name in MODELS if name.endswith("-tiny") and not MODELS[name].unusual]


#: One recipe of each way of quantizing forward, which is all that these codes and losses rest on; those that remember
#: something have their losses from the same weights in test_steps.py.
QUICK = ("rowwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
def test_from_the_same_weights_the_first_codes_are_equal_and_losses_within_2e_4(
    make_config: MakeConfig, name: str
) -> None:
    config = make_config(dtype="float32", recipe=name)
    left, right = pair(config)
    ids = training_batch(TOKENS, config, 1)[0, :, :-1]
    seen: dict[str, torch.Tensor] = {}
    left.model.layers[0].attention.norm.register_forward_hook(
        lambda module, inputs, output: seen.setdefault("torch", output.detach())
    )
    left.model(torch.from_numpy(ids))
    x = seen["torch"].reshape(-1, 64)
    y = norm(
        "layers.0.attention.norm", right.decoder.config, right.params, right.params["embedding.weight"][ids], ignore
    ).reshape(-1, 64)
    w = left.model.layers[0].attention.q_proj.weight.detach()
    gemm = quaver.recipes.get(name).fprop
    for spec, for_torch, for_jax in ((gemm.a, x, y), (gemm.b, w, right.params["layers.0.attention.q_proj.weight"])):
        if spec is not None:
            np.testing.assert_array_equal(
                qt.quantize(for_torch, spec).codes().numpy(), qj.quantize(for_jax, spec).codes()
            )
    batch = training_batch(TOKENS, config, 1)
    assert left.loss(batch) == pytest.approx(right.loss(batch), rel=0, abs=2e-4)


@pytest.mark.parametrize("family", TINY)
def test_bfloat16_casts_the_same_as_torch_autocast(make_config: MakeConfig, family: str) -> None:
    config = make_config(model=family)
    left, right = pair(config)
    ids = training_batch(TOKENS, config, 1)[0, :, :-1]
    dtypes: dict[str, str] = {}
    for name, module in left.model.named_modules():
        if name:
            module.register_forward_hook(
                lambda module, inputs, output, name=name: dtypes.update({name: str(output.dtype)[6:]})
            )
    with torch.autocast("cpu", torch.bfloat16):
        left.model(torch.from_numpy(ids))
    heard: dict[str, str] = {}
    look = partial(logits_of, right.decoder, look=lambda name, x: heard.update({name: str(x.dtype)}))
    jax.eval_shape(look, right.params, right.state, jnp.asarray(ids, jnp.int32))
    if MODELS[family].tied:
        heard.pop("head")  # in PyTorch the embedding's matrix, and no module
    assert heard == dtypes and list(heard) == list(dtypes)


@pytest.fixture(params=TINY)
def two_layers(request: pytest.FixtureRequest, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Of each family: Gemma 2 has a layer of either kind among them."""
    monkeypatch.setitem(MODELS, "two layers", replace(MODELS[request.param], layers=2))
    return make_config(dtype="float32", model="two layers")


# Heads that share a projection, a tied head with two kinds of layers, and norms of heads.
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("gpt-neox-tiny", "rowwise"),
        ("gemma2-tiny", "mxfp8(attention=True)"),
        ("qwen3-tiny", "rowwise"),
    ],
)
def test_families_have_pytorchs_loss_under_a_recipe(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, family: str, recipe: str
) -> None:
    monkeypatch.setitem(MODELS, "one layer", replace(MODELS[family], layers=1))
    config = make_config(dtype="float32", model="one layer", recipe=recipe)
    left, right = pair(config)
    batch = training_batch(TOKENS, config, 1)
    assert left.loss(batch) == pytest.approx(right.loss(batch), rel=0, abs=2e-4)


def test_every_family_has_pytorchs_loss_and_gradients(two_layers: TrainConfig) -> None:
    left, right = pair(two_layers)
    batch = training_batch(TOKENS, two_layers, 1)
    expected = loss_of(left.model, torch.from_numpy(batch[0]), "float32")
    expected.backward()
    differentiate = jax.jit(gradients, static_argnums=0)
    loss, grads, _ = differentiate(right.decoder, right.params, right.state, batch.astype(np.int32))
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in left.model.named_parameters():
        assert_close(name, grads[name], parameter.grad, 1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_chunk": 64}, "JAX cannot take the loss in chunks yet"),
        ({"model": "llama3.1-8b"}, "JAX cannot stretch rotary positions yet, as llama3.1-8b asks"),
    ],
)
def test_options_unsupported_by_jax_are_refused_before_the_run_starts(
    make_config: MakeConfig, options: dict[str, str], message: str
) -> None:
    config = make_config(framework="jax", **options)
    with pytest.raises(ValueError, match=message):
        run_training(config)
    with pytest.raises(ValueError, match=message):
        compare_runs(config, [config.recipe])
    assert not Path(config.out).exists()
