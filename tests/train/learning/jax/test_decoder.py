"""The decoder of JAX beside that of PyTorch, from the same weights and batches."""

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
from quaver.train.configuration import recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.schedule import lr_at
from quaver.train.configuration.sizes import MODELS
from quaver.train.data.batches import training_batch
from quaver.train.data.tokens import load
from quaver.train.learning import frameworks
from quaver.train.learning.jax.decoder import ignore, logits_of, norm
from quaver.train.learning.jax.learner import JaxLearner
from quaver.train.learning.jax.steps import gradients
from quaver.train.learning.torch.decoder import loss_of
from quaver.train.learning.torch.learner import TorchLearner
from tests.close import assert_close
from tests.train.conftest import MakeConfig

TEXT = " ".join(f"{n} times {m} is {n * m}." for n in range(60) for m in range(40))
TOKENS = np.frombuffer(TEXT.encode(), np.uint8)

TINY = [name for name in MODELS if name.endswith("-tiny")]


def pair(config: TrainConfig, vocab: int = 256) -> tuple[TorchLearner, JaxLearner]:
    recipe = recipe_name.find(config.recipe)
    left = frameworks.make(replace(config, framework="torch"), recipe, vocab)
    right = frameworks.make(replace(config, framework="jax"), recipe, vocab)
    assert isinstance(left, TorchLearner) and isinstance(right, JaxLearner)
    return left, right


def same_step_losses(config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Both frameworks' losses, JAX beginning every step from PyTorch's weights, moments and state."""
    left, right = pair(config)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(1, steps + 1):
        right.load(*left.tensors())
        batch, lr = training_batch(TOKENS, config, step), lr_at(step, config)
        for learner, own in zip((left, right), losses, strict=True):
            own.append(learner.step(batch, lr)[0])
    return losses


@pytest.mark.parametrize("name", RECIPES)
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
    for spec, in_torch, theirs in ((gemm.a, x, y), (gemm.b, w, right.params["layers.0.attention.q_proj.weight"])):
        if spec is not None:
            np.testing.assert_array_equal(
                qt.quantize(in_torch, spec).codes().numpy(), qj.quantize(theirs, spec).codes()
            )
    batch = training_batch(TOKENS, config, 1)
    assert left.loss(batch) == pytest.approx(right.loss(batch), rel=0, abs=2e-4)


@pytest.mark.parametrize("name", ["delayed(history=4)", "nvfp4"])
def test_state_goes_from_step_to_step_as_in_pytorch(make_config: MakeConfig, name: str) -> None:
    losses = same_step_losses(make_config(dtype="float32", recipe=name), 6)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_one_of_50_steps_from_the_same_weights_has_the_same_loss(make_config: MakeConfig, name: str) -> None:
    config = make_config(dtype="float32", recipe=name, steps=50, warmup=30, batch=8, sequence=128)
    losses = same_step_losses(config, 50)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=2e-4)


def test_50_steps_by_themselves_stay_together_in_float32(make_config: MakeConfig) -> None:
    config = make_config(dtype="float32", steps=50, warmup=30)
    left, right = pair(config)
    for step in range(1, 51):
        batch, lr = training_batch(TOKENS, config, step), lr_at(step, config)
        (loss, norm), (other, its_norm) = left.step(batch, lr), right.step(batch, lr)
        assert abs(loss - other) < 1e-4 and abs(norm / its_norm - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("bf16", "nvfp4", "mxfp4")])
def test_50_steps_of_tiny_on_the_default_text_differ_little_on_average(make_config: MakeConfig, name: str) -> None:
    """A code on the other side of a rounding boundary is a change of 6 %: single steps differ by up to 0.004."""
    config = make_config(
        dtype="float32", recipe=name, model="tiny", text=(), steps=50, warmup=30, batch=8, sequence=128
    )
    tokens = load(config).train
    left, right = pair(config)
    apart = []
    for step in range(1, 51):
        batch, lr = training_batch(tokens, config, step), lr_at(step, config)
        apart.append(abs(left.step(batch, lr)[0] - right.step(batch, lr)[0]))
    assert max(apart) > 0 and np.mean(apart) < 1e-3


@pytest.mark.parametrize("family", TINY)
def test_bfloat16_casts_what_torch_autocast_casts(make_config: MakeConfig, family: str) -> None:
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


def test_every_family_has_pytorchs_loss_under_a_recipe(two_layers: TrainConfig) -> None:
    left, right = pair(replace(two_layers, recipe="rowwise"))
    batch = training_batch(TOKENS, two_layers, 1)
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


@pytest.mark.parametrize("recompute, recipe", [("mlp", "bf16"), ("full", "delayed(history=4)")])
def test_recomputation_changes_no_loss(make_config: MakeConfig, recompute: str, recipe: str) -> None:
    config = make_config(dtype="float32", recipe=recipe, framework="jax")
    losses = []
    for what in ("none", recompute):
        learner = frameworks.make(replace(config, recompute=what), recipe_name.find(config.recipe), 256)
        losses.append([learner.step(training_batch(TOKENS, config, step), 1e-2)[0] for step in (1, 2, 3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "tensorwise(attention=True)"}, "JAX cannot run attention in eight bits yet"),
        ({"loss_chunk": 64}, "JAX cannot take the loss in chunks yet"),
        ({"model": "llama3.1-8b"}, "JAX cannot stretch rotary positions yet, as llama3.1-8b asks"),
    ],
)
def test_what_jax_cannot_do_yet_is_said_before_the_run_starts(
    make_config: MakeConfig, options: dict[str, str], message: str
) -> None:
    config = make_config(framework="jax", **options)
    with pytest.raises(ValueError, match=message):
        run_training(config)
    with pytest.raises(ValueError, match=message):
        compare_runs(config, [config.recipe])
    assert not Path(config.out).exists()
