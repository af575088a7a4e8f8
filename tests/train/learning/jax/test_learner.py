"""Runs in JAX: resumed, handed to PyTorch and back, stopped by a NaN, and without PyTorch installed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from quaver.train.configuration import recipe_name
from quaver.train.configuration.config import to_toml
from quaver.train.data.batches import training_batch
from quaver.train.learning import frameworks
from quaver.train.learning.jax.learner import JaxLearner
from quaver.train.records.metrics import Record
from quaver.train.running.loop import TrainResult, run_training
from tests.train.conftest import MakeConfig

TOKENS = np.tile(np.arange(97, 123, dtype=np.uint8), 40)


class Stop(Exception):
    """What a test's watcher raises."""


def stop_after(step: int) -> object:
    def watch(record: Record) -> None:
        if record["step"] == step:
            raise Stop

    return watch


def learner(make_config: MakeConfig, **options: object) -> JaxLearner:
    config = make_config(framework="jax", **options)
    jax_learner = frameworks.make(config, recipe_name.find(config.recipe), 256)
    assert isinstance(jax_learner, JaxLearner)
    return jax_learner


@pytest.mark.parametrize("recipe", ["delayed(history=4)", "nvfp4"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make_config: MakeConfig, recipe: str) -> None:
    options = {"recipe": recipe, "framework": "jax", "dtype": "float32"}
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
        config = make_config(f"{first}-{second}", recipe=recipe, dtype="float32", framework=first, keep=0)
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
    split = run_training(make_config("a", framework="jax", dtype="float32", batch=1, accumulate=2))
    whole = run_training(make_config("b", framework="jax", dtype="float32"))
    np.testing.assert_allclose(list(split.losses.values()), list(whole.losses.values()), rtol=1e-4)


def test_where_a_loss_that_is_not_finite_came_from(make_config: MakeConfig) -> None:
    training = learner(make_config, dtype="float32")
    batch = training_batch(TOKENS, training.config, 1)
    assert training.first_output(batch) == "every module's output is finite"
    sound, broken = dict(training.params), "layers.0.mlp.up_proj.weight"
    training.params = {**sound, broken: sound[broken].at[3].set(3e38)}
    before = jax.device_get(training.params)
    assert not np.isfinite(training.step(batch, 1e-3)[0])
    assert training.first_output(batch) == "the first output that is not finite is that of layers.0.mlp.up_proj"
    after = jax.device_get(training.params)
    assert all(np.array_equal(before[name], after[name]) for name in before) and training.updates == 0
    training.params = {**sound, "norm.weight": sound["norm.weight"].at[3].set(np.nan)}
    assert training.first_output(batch) == "the parameter norm.weight is already not finite"


def test_where_a_gradient_that_is_not_finite_came_from(make_config: MakeConfig) -> None:
    training = learner(make_config, dtype="float32")
    batch = training_batch(TOKENS, training.config, 1)
    # Logits are what they were; what flows back through the head is not.
    training.params = training.params | {
        "head.weight": training.params["head.weight"] * 1e38,
        "norm.weight": training.params["norm.weight"] * 1e-37,
    }
    loss, norm = training.step(batch, 1e-3)
    assert np.isfinite(loss) and not np.isfinite(norm) and training.updates == 0
    assert training.first_gradient(batch) in (
        "the norm overflowed",
        "the first gradient that is not finite is that of norm.weight",
    )


def test_a_nan_stops_the_run_with_a_sentence(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(framework="jax", dtype="float32", checkpoint_every=2)
    step = JaxLearner.step

    def poison(self: JaxLearner, batch: np.ndarray, lr: float) -> tuple[float, float]:
        if self.updates == 3:
            name = "layers.0.mlp.down_proj.weight"
            self.params = {**self.params, name: self.params[name].at[0, 0].set(np.nan)}
        return step(self, batch, lr)

    monkeypatch.setattr(JaxLearner, "step", poison)
    said = r"stopped at step 4: the loss is nan; the parameter layers\.0\.mlp\.down_proj\.weight .*step-000002"
    with pytest.raises(ValueError, match=said):
        run_training(config)


def test_the_report_says_what_was_quantized(make_config: MakeConfig) -> None:
    assert str(learner(make_config, recipe="mxfp8").conversion) == (
        "converted 7 to mxfp8\n  left alone: head (as the embedding, it stays in high precision)"
    )


def test_an_unknown_device_is_one_sentence(make_config: MakeConfig) -> None:
    for name in ("tpu9", "cuda:99", "cpu:7", "cpu:x"):
        with pytest.raises(ValueError, match=f"the device '{name}' is not available to JAX, which has cpu:0"):
            run_training(make_config(framework="jax", device=name))


@pytest.mark.parametrize(("framework", "extra"), [("jax", "train-jax"), ("torch", "train")])
def test_a_missing_framework_is_one_sentence(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, framework: str, extra: str
) -> None:
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"--framework {framework} needs {framework}, .*quaver\[{extra}\]'"):
        run_training(make_config(framework=framework))


def test_pytorch_is_not_needed(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(to_toml(make_config(framework="jax", recipe="tensorwise", steps=1)))
    code = "import sys; sys.modules['torch'] = None; from quaver.train.commands.cli import app; app()"
    command = [sys.executable, "-c", code, "train", "--config", str(tmp_path / "c.toml"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "converted 7 to tensorwise" in done.stdout and "loss.png" in done.stdout
