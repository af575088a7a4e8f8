"""Steps in JAX: compared with PyTorch, recomputed, in micro-batches, resumed, and continued in PyTorch and back.

They are in one file since most of them run the same compiled steps, which are cached for the length of a file.
"""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from quaver.recipes import RECIPES
from quaver.train import config as recipe_name
from quaver.train import frameworks
from quaver.train.config import TrainConfig, lr_at
from quaver.train.data import load, training_batch
from quaver.train.loop import TrainResult, run_training
from quaver.train.metrics import Record
from tests.train.conftest import MakeConfig
from tests.train.jax.pairs_of_learners import TOKENS, pair


class Stop(Exception):
    """What a test's watcher raises."""


def stop_after(step: int) -> object:
    def watch(record: Record) -> None:
        if record["step"] == step:
            raise Stop

    return watch


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


@pytest.mark.parametrize("name", ["delayed(history=4)", "nvfp4"])
def test_state_evolves_over_steps_as_in_pytorch(make_config: MakeConfig, name: str) -> None:
    losses = same_step_losses(make_config(dtype="float32", recipe=name), 6)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_one_of_50_steps_from_the_same_weights_has_the_same_loss(make_config: MakeConfig, name: str) -> None:
    config = make_config(dtype="float32", recipe=name, steps=50, warmup=30, batch=8, sequence=128)
    losses = same_step_losses(config, 50)
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=2e-4)


def test_20_steps_by_themselves_stay_together_in_float32(make_config: MakeConfig) -> None:
    config = make_config(dtype="float32", steps=20, warmup=10)
    left, right = pair(config)
    for step in range(1, 21):
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
    differences = []
    for step in range(1, 51):
        batch, lr = training_batch(tokens, config, step), lr_at(step, config)
        differences.append(abs(left.step(batch, lr)[0] - right.step(batch, lr)[0]))
    assert max(differences) > 0 and np.mean(differences) < 1e-3


@pytest.mark.parametrize("recompute, recipe", [("mlp", "bf16"), ("full", "delayed(history=4)")])
def test_recomputation_changes_no_loss(make_config: MakeConfig, recompute: str, recipe: str) -> None:
    config = make_config(dtype="float32", recipe=recipe, framework="jax")
    losses = []
    for what in ("none", recompute):
        learner = frameworks.make_learner(replace(config, recompute=what), recipe_name.find_recipe(config.recipe), 256)
        losses.append([learner.step(training_batch(TOKENS, config, step), 1e-2)[0] for step in (1, 2, 3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make_config: MakeConfig) -> None:
    options = {"recipe": "delayed(history=4)", "framework": "jax", "dtype": "float32"}
    whole = run_training(make_config("whole", **options))
    config = make_config("parts", **options)
    with pytest.raises(Stop):
        run_training(config, watch=stop_after(8))  # type: ignore[arg-type]
    parts = run_training(config, resume=True)
    assert parts.losses == whole.losses and parts.validation_losses == whole.validation_losses
    left, right = ((result.model.params, result.model.state) for result in (whole, parts))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), left, right))


@pytest.mark.parametrize("recipe", ["delayed(history=4)", "nvfp4"])
def test_a_checkpoint_of_one_framework_is_resumed_by_the_other(make_config: MakeConfig, recipe: str) -> None:
    """Ten steps in one framework, and five in each in both orders: the same losses and the same tensors."""
    results: dict[tuple[str, str], TrainResult] = {}
    for first, second in (("torch", "torch"), ("torch", "jax"), ("jax", "torch")):
        # With about a third of seeds, sums that differ in the last bit round a 4-bit gradient to another code.
        config = make_config(f"{first}-{second}", recipe=recipe, dtype="float32", framework=first, keep=0, seed=2)
        with pytest.raises(Stop):
            run_training(config, watch=stop_after(6))  # type: ignore[arg-type]
        results[first, second] = run_training(replace(config, framework=second), resume=True)
    expected = results.pop(("torch", "torch"))
    for result in results.values():
        np.testing.assert_allclose(list(result.losses.values()), list(expected.losses.values()), atol=1e-3)
        for part in ("model", "optimizer"):
            for step in (5, 10):
                ours, theirs = (load_file(r.folder / f"step-{step:06d}/{part}.safetensors") for r in (result, expected))
                assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
                    n: (t.shape, t.dtype) for n, t in theirs.items()
                }
                for name in ours:
                    if name.endswith((".count", "/step")):
                        np.testing.assert_array_equal(ours[name], theirs[name])
    assert json.loads((results["torch", "jax"].folder / "step-000010/state.json").read_text())["step"] == 10


def test_micro_batches_are_averaged(make_config: MakeConfig) -> None:
    options = {"framework": "jax", "dtype": "float32", "steps": 4}
    split = run_training(make_config("a", batch=1, accumulate=2, **options))
    whole = run_training(make_config("b", **options))
    np.testing.assert_allclose(list(split.losses.values()), list(whole.losses.values()), rtol=1e-4)
