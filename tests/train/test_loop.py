import json
import math
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import quaver
from quaver.train import checkpoint
from quaver.train.checkpoint import CheckpointError
from quaver.train.config import FRAMEWORKS, TrainConfig, lr_at, to_toml
from quaver.train.learner import NonFiniteError
from quaver.train.loop import Interrupted, run_training
from quaver.train.metrics import Record, losses, read, validation_losses
from quaver.train.model_config import MODELS
from quaver.train.torch import decoder
from quaver.train.torch.decoder import build_decoder, loss_of
from quaver.train.torch.learner import first_gradient, first_module
from tests import forked
from tests.train.conftest import MakeConfig


def stop_at(step: int) -> Callable[[Record], None]:
    """A watcher that presses Ctrl-C while a step is being recorded."""

    def watch(record: Record) -> None:
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    return watch


@pytest.mark.parametrize("recipe", ["bf16", "delayed(history=4)", "mxfp8", "nvfp4"])
def test_a_resumed_run_equals_an_uninterrupted_one(make_config: MakeConfig, recipe: str) -> None:
    whole = run_training(make_config("whole", recipe=recipe))
    config = make_config("parts", recipe=recipe)
    with pytest.raises(Interrupted, match=r"stopped after step 7 of 10, saved as .*step-000007") as stopped:
        run_training(config, watch=stop_at(7))
    assert stopped.value.exit_code == 130
    parts = run_training(config, resume=True)
    assert parts.losses == whole.losses
    assert parts.validation_losses == whole.validation_losses
    left, right = whole.model.state_dict(), parts.model.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_auto_resume_starts_or_resumes_a_run(make_config: MakeConfig) -> None:
    """Call the same function again, as torchrun restarts a process."""
    whole = run_training(make_config("whole"))
    config = make_config("restarted")
    for died in (3, 8):

        def die(record: Record, died: int = died) -> None:
            if record["step"] == died:
                raise SystemExit

        with pytest.raises(SystemExit):
            run_training(config, resume="auto", watch=die)
    assert run_training(config, resume="auto").losses == whole.losses
    assert run_training(config, resume="auto").losses == whole.losses, "of a finished run"


def test_training_learns_and_records(make_config: MakeConfig) -> None:
    config = make_config(steps=60, validate_every=30, accumulate=2)
    seen: list[Record] = []
    result = run_training(config, watch=seen.append)
    assert list(result.losses) == list(range(1, 61)) and list(result.validation_losses) == [30, 60]
    assert result.validation_loss < 3.0 < result.losses[1]
    assert seen == read(result.folder / "metrics.jsonl")
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"} == set(seen[0])
    assert losses(seen) == result.losses and validation_losses(seen) == result.validation_losses


def test_the_users_default_dtype_is_not_the_runs(make_config: MakeConfig) -> None:
    expected = run_training(make_config("a", recipe="mxfp8")).losses
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            run = run_training(make_config(str(dtype), recipe="mxfp8"))
            assert {p.dtype for p in run.model.parameters()} == {torch.float32}
            assert run.losses == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_recipe_object_takes_the_place_of_the_name(make_config: MakeConfig) -> None:
    named = run_training(make_config("a", recipe="mxfp8"))
    given = run_training(make_config("b"), quaver.recipes.mxfp8())
    assert named.losses == given.losses != run_training(make_config("c")).losses


def test_accumulation_is_the_mean_over_micro_batches(make_config: MakeConfig) -> None:
    split = run_training(make_config("a", dtype="float32", batch=2, accumulate=2))
    whole = run_training(make_config("b", dtype="float32", batch=4, accumulate=1))
    torch.testing.assert_close(list(split.losses.values()), list(whole.losses.values()), rtol=1e-4, atol=1e-4)


def test_a_run_is_never_written_over(make_config: MakeConfig) -> None:
    config = make_config()
    run_training(config)
    with pytest.raises(ValueError, match="already holds a run; continue it with --resume, or give another --out"):
        run_training(config)
    with pytest.raises(ValueError, match="holds no run to resume"):
        run_training(make_config("nowhere"), resume=True)


def test_other_text_is_not_resumed_on(make_config: MakeConfig, text: Path) -> None:
    config = make_config()
    run_training(config)
    (text / "00.txt").write_text("something else")
    with pytest.raises(CheckpointError, match="made with text"):
        run_training(replace(config, steps=20), resume=True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_checkpoint_of_another_model_gives_one_clear_error(make_config: MakeConfig, framework: str) -> None:
    config = make_config(framework=framework)
    run_training(config)
    forge(Path(config.out) / "step-000010", "model", lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(CheckpointError, match=r"step-000010 does not fit this model: .*norm\.weight"):
        run_training(replace(config, steps=20), resume=True)


def forge(path: Path, part: str, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change a checkpoint's tensors, digests included."""
    tensors = load_file(path / f"{part}.safetensors")
    change(tensors)
    save_file(tensors, path / f"{part}.safetensors")
    checkpoint.write_state(path, json.loads((path / "state.json").read_text()))


NORM = np.ones(32, np.float32)
#: By case: the changed part of a checkpoint, the change, and the error message.
FORGERIES = {
    "empty optimizer": ("optimizer", lambda t: t.clear(), "embedding.weight/exp_avg is missing in the optimizer, and"),
    "missing moment": (
        "optimizer",
        lambda t: t.pop("norm.weight/exp_avg_sq"),
        "norm.weight/exp_avg_sq is missing in the",
    ),
    "moments of another optimizer": (
        "optimizer",
        lambda t: t.update({name.replace("exp_avg_sq", "momentum_buffer"): t.pop(name) for name in [*t]}),
        "embedding.weight/exp_avg_sq is missing in the optimizer, and",
    ),
    "moment too many": ("optimizer", lambda t: t.update({"x/exp_avg": NORM}), "x/exp_avg is not part of the optimizer"),
    "nameless moment": ("optimizer", lambda t: t.update({"x": NORM}), "x is not part of the optimizer"),
    "moment's shape": (
        "optimizer",
        lambda t: t.update({"norm.weight/exp_avg": NORM[:4]}),
        r"is float32 \(4,\)",
    ),
    "tensor too many": ("model", lambda t: t.update({"x": NORM}), "x is not part of the model"),
    "missing history": ("model", lambda t: t.pop("layers.0.mlp.up_proj.history"), "up_proj.history is missing"),
    "type": ("model", lambda t: t.update({"norm.weight": np.ones(32)}), "norm.weight is float64"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_expected_tensor_is_there_and_no_other(make_config: MakeConfig, framework: str) -> None:
    # In float32 JAX's step is that of another file's runs, which the workers compile once.
    config = make_config(framework=framework, recipe="delayed(history=4)", dtype="float32", steps=1)
    path = run_training(config).folder / "step-000001"
    copy = path.with_name("copy")
    shutil.copytree(path, copy)
    for part, change, message in FORGERIES.values():
        forge(path, part, change)
        with pytest.raises(CheckpointError, match=f"does not fit this model: .*{message}"):
            run_training(replace(config, steps=2), resume=True)
        shutil.copytree(copy, path, dirs_exist_ok=True)
    assert list(run_training(replace(config, steps=2), resume=True).losses) == [1, 2]


def test_a_full_disk_ends_the_run_with_a_clear_error(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    write = checkpoint.write

    def full(path: Path, tensors: dict[str, np.ndarray]) -> None:
        if "step-000010" in str(path):
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the last good checkpoint is .*step-000005"):
        run_training(config)
    monkeypatch.undo()
    assert run_training(config, resume=True).losses == run_training(make_config("whole")).losses


def test_a_disk_that_fills_while_metrics_are_written_ends_the_run_with_a_clear_error(make_config: MakeConfig) -> None:
    config = make_config()
    metrics = Path(config.out) / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record: Record) -> None:
        if record["step"] == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 9, before[1]))

    try:
        with pytest.raises(
            ValueError, match=r"stopped after step 8: could not write .*metrics\.jsonl: .*; the last"
        ) as e:
            run_training(config, watch=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-000005; fix this, for example by freeing disk space, then continue with --resume" in str(e.value)
    assert len(read(metrics)) == 8 and not metrics.read_text().endswith("\n")
    assert run_training(config, resume=True).losses == run_training(make_config("whole")).losses


@pytest.mark.parametrize("fate", ["removed", "renamed", "replaced"])
def test_a_removed_folder_ends_the_run_with_a_clear_error(make_config: MakeConfig, tmp_path: Path, fate: str) -> None:
    config, moved = make_config(), tmp_path / "moved"

    def remove_overrides(record: Record) -> None:
        if record["step"] == 7:
            shutil.rmtree(config.out) if fate == "removed" else os.rename(config.out, moved)
            if fate == "replaced":
                run_training(replace(config, steps=1))

    with pytest.raises(
        ValueError, match=r"stopped after step 8: the run's folder .* was removed or renamed while it ran"
    ):
        run_training(config, watch=remove_overrides)
    assert Path(config.out).exists() == (fate == "replaced")
    if fate == "renamed":
        os.rename(moved, config.out)
        assert run_training(config, resume=True).losses == run_training(make_config("whole")).losses


CHANGED = {"recipe": "mxfp8", "lr": 0.01, "batch": 3, "sequence": 16, "dtype": "float32", "clip": 2.0}


def test_resuming_with_another_option_warns(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    run_training(config)
    for name, value in CHANGED.items():
        out = shutil.copytree(config.out, f"{config.out}-{name}")
        more = replace(config, out=out, steps=2, **{name: value})
        before = "0.005, the model's own" if name == "lr" else repr(getattr(config, name))
        message = f"from step 1 with other options: {name} {value!r} \\(was {before}\\); a run with either alone"
        with pytest.warns(UserWarning, match=message) as warned:
            run_training(more, resume=True)
        assert len(warned) == 1
        assert list(run_training(replace(more, steps=3), resume=True).losses) == [1, 2, 3]


def test_a_run_that_is_finished_takes_no_other_option(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    path = run_training(config).folder / "config.toml"
    before = path.read_bytes()
    for name, value in CHANGED.items():
        message = rf"step-000001 is the last of this run's 1 steps, .* other options: {name} .*; give more --steps, or"
        with pytest.raises(ValueError, match=message):
            run_training(replace(config, **{name: value}), resume=True)
        assert path.read_bytes() == before
    assert list(run_training(replace(config, keep=5), resume=True).losses) == [1]
    assert path.read_bytes() == before, "nothing trained with --keep 5"


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"final_lr": 1.0}, False), ({"final_lr": 1.0, "recipe": "mxfp8 until 50%, bf16"}, True)],
)
def test_a_step_count_that_changes_rates_or_recipes_warns(
    make_config: MakeConfig, options: dict[str, Any], warns: bool
) -> None:
    config = make_config(steps=4, **options)
    run_training(config)
    for more, before in ((6, 4), (8, 6)):
        message = rf"other options: steps {more} \(was {before}\); a run with either alone"
        with pytest.warns(UserWarning, match=message) if warns else nullcontext():
            run_training(replace(config, steps=more), resume=True)
    # No step is left to train with other options.
    assert len(run_training(replace(config, steps=8), resume=True).losses) == 8


def test_a_step_count_that_changes_no_past_rate_does_not_warn(make_config: MakeConfig) -> None:
    config = make_config(steps=2)
    assert config.warmup == 2
    run_training(config)
    run_training(replace(config, steps=3), resume=True)


def test_a_rate_that_is_the_models_own_is_no_other_option(make_config: MakeConfig) -> None:
    config = make_config(steps=1)
    run_training(config)
    assert list(run_training(replace(config, lr=MODELS["nano"].lr, steps=2), resume=True).losses) == [1, 2]
    without = replace(config, lr=0.5, clip=0.0, steps=3)
    with pytest.warns(UserWarning, match=r"lr 0.5 \(was 0.005\), clip none \(was 1.0\)"):
        run_training(without, resume=True)


def test_a_folder_in_the_place_of_a_file_is_seen_before_training(make_config: MakeConfig) -> None:
    trained: list[Record] = []
    for name in ("config.toml", "metrics.jsonl", "tokenizer.json", "loss.png"):
        config = make_config(f"run-{name}")
        (Path(config.out) / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=rf"{name} is a folder, not a file; move it away"):
            run_training(config, watch=trained.append)
    assert not trained


def test_the_first_module_that_is_not_finite_is_named() -> None:
    model = build_decoder(MODELS["nano"], 256, 0, torch.device("cpu"))
    batch = torch.zeros((1, 2, 33), dtype=torch.int64)
    model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: output / 0)
    loss = partial(loss_of, model, dtype="float32")
    message = "the first output that is not finite is that of layers.0.mlp.up_proj"
    assert first_module(model, batch, loss).message == message
    model.norm.weight.data[3] = math.nan
    assert first_module(model, batch, loss).message == "the parameter norm.weight is already not finite"
    model.head.weight.grad = torch.full_like(model.head.weight, math.inf)
    assert first_gradient(model).message == "the first gradient that is not finite is that of head.weight"


def test_a_nan_loss_stops_before_anything_is_lost(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(checkpoint_every=2)
    convert = decoder.qt.convert

    def poisoned(model: torch.nn.Module, *rest: object, **options: object) -> object:
        calls = iter(range(1000))

        def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            return output * math.nan if next(calls) >= 3 else output

        report = convert(model, *rest, **options)
        model.layers[0].mlp.down_proj.register_forward_hook(hook)
        return report

    monkeypatch.setattr(decoder.qt, "convert", poisoned)
    with pytest.raises(NonFiniteError) as error:
        run_training(replace(config, validate_every=0))
    for message in ("stopped at step 4", "the loss is nan", "layers.0.mlp.down_proj", "step-000002"):
        assert message in str(error.value)
    assert list(losses(read(Path(config.out) / "metrics.jsonl"))) == [1, 2, 3]


def test_the_rate_rises_then_falls(make_config: MakeConfig) -> None:
    config = make_config(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [lr_at(step, config) for step in range(1, 101)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[0] < 0.1 and 0.99 < max(rates) <= 1.0 and 0.1 < rates[-1] < 0.101


def test_an_unknown_device_gives_one_clear_error(make_config: MakeConfig) -> None:
    for name in ("tpu9", "cuda:99"):
        with pytest.raises(ValueError, match=f"the device '{name}' is not available"):
            run_training(make_config(device=name))


def command(config: TrainConfig, tmp_path: Path) -> list[str]:
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    return [sys.executable, "-m", "quaver.train", "train", "--config", str(tmp_path / "c.toml")]


def wait_for_steps(process: Any, config: TrainConfig, steps: int) -> None:
    while len(read(Path(config.out) / "metrics.jsonl")) < steps:
        assert process.poll() is None
        time.sleep(0.02)


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Restore SIGHUP: tests that run under nohup ignore it, and so would every process that they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_loses_nothing(make_config: MakeConfig, tmp_path: Path, number: signal.Signals) -> None:
    # The learning rate does not depend on the number of steps if it ends where it starts.
    config = make_config("stopped", steps=4000, checkpoint_every=3, validate_every=0, final_lr=1.0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = forked.quick.Popen(command(config, tmp_path), stderr=subprocess.PIPE, env=environment)
    wait_for_steps(process, config, 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    done = read(Path(config.out) / "metrics.jsonl")[-1]["step"]
    last = checkpoint.latest(Path(config.out))
    assert last is not None and b"Traceback" not in errors
    if number is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL and checkpoint.load(last, {}).step in range(done - 3, done + 1)
    else:
        assert process.returncode == 128 + number and b"stopped after step" in errors
        assert last.name == f"step-{done:06d}"
    fewer = replace(config, steps=done + 2)
    assert run_training(fewer, resume=True).losses == run_training(replace(fewer, out=str(tmp_path / "whole"))).losses


@pytest.mark.usefixtures("hangs_up")
def test_a_terminal_that_hangs_up_loses_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP, and later writes to it fail."""
    config = make_config("stopped", steps=4000, checkpoint_every=0, validate_every=0)
    terminal, end = pty.openpty()
    process = forked.quick.Popen(
        command(config, tmp_path),
        **dict.fromkeys(("stdin", "stdout", "stderr"), end),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=forked.take_terminal,
    )
    os.close(end)
    wait_for_steps(process, config, 3)
    os.close(terminal)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    last = checkpoint.latest(Path(config.out))
    assert last is not None and checkpoint.load(last, {}).step == read(Path(config.out) / "metrics.jsonl")[-1]["step"]


def test_a_run_is_not_resumed_backwards(make_config: MakeConfig) -> None:
    config = make_config()
    run_training(config)
    with pytest.raises(ValueError, match="step-000010 is beyond the 5 steps of this run; give more --steps"):
        run_training(replace(config, steps=5), resume=True)
