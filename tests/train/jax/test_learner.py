"""Runs in JAX: stopped by a NaN, without PyTorch installed, and on devices that there are not."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from quaver.train import config as recipe_name
from quaver.train import frameworks
from quaver.train.config import to_toml
from quaver.train.data import training_batch
from quaver.train.jax.learner import JaxLearner
from quaver.train.loop import run_training
from tests.conftest import ROOT
from tests.train.conftest import MakeConfig

TOKENS = np.tile(np.arange(97, 123, dtype=np.uint8), 40)


def learner(make_config: MakeConfig, **options: object) -> JaxLearner:
    config = make_config(framework="jax", **options)
    jax_learner = frameworks.make_learner(config, recipe_name.find_recipe(config.recipe), 256)
    assert isinstance(jax_learner, JaxLearner)
    return jax_learner


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
    # Logits do not change, but the gradients through the head do.
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


def test_a_nan_stops_the_run_with_a_clear_error(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(framework="jax", dtype="float32", checkpoint_every=2)
    step = JaxLearner.step

    def poison(self: JaxLearner, batch: np.ndarray, lr: float) -> tuple[float, float]:
        if self.updates == 3:
            name = "layers.0.mlp.down_proj.weight"
            self.params = {**self.params, name: self.params[name].at[0, 0].set(np.nan)}
        return step(self, batch, lr)

    monkeypatch.setattr(JaxLearner, "step", poison)
    message = r"stopped at step 4: the loss is nan; the parameter layers\.0\.mlp\.down_proj\.weight .*step-000002"
    with pytest.raises(ValueError, match=message):
        run_training(config)


def test_the_report_says_what_was_quantized(make_config: MakeConfig) -> None:
    assert str(learner(make_config, recipe="mxfp8").conversion) == (
        "converted 7 to mxfp8\n  left alone: head (as the embedding, it stays in high precision)"
    )


def test_an_unknown_device_gives_one_clear_error(make_config: MakeConfig) -> None:
    for name in ("tpu9", "cuda:99", "cpu:7", "cpu:x"):
        with pytest.raises(ValueError, match=f"the device '{name}' is not available to JAX, which has cpu:0"):
            run_training(make_config(framework="jax", device=name))


@pytest.mark.parametrize(("framework", "extra"), [("jax", "train-jax"), ("torch", "train")])
def test_a_missing_framework_gives_one_clear_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, framework: str, extra: str
) -> None:
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"--framework {framework} needs {framework}, .*quaver\[{extra}\]'"):
        run_training(make_config(framework=framework))


def test_pytorch_is_not_needed(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(framework="jax", recipe="tensorwise", steps=1, validate_every=0)
    (tmp_path / "c.toml").write_text(to_toml(config))
    # XLA's programs are those of other tests.
    code = "import sys; sys.modules['torch'] = None; from tests.conftest import compile_quickly; compile_quickly(); "
    code += "from quaver.train.commands.cli import app; app()"
    command = [sys.executable, "-c", code, "train", "--config", str(tmp_path / "c.toml"), "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "converted 7 to tensorwise" in done.stdout and "loss.png" in done.stdout
