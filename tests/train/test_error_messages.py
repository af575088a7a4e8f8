"""Errors that once were tracebacks or endless runs give one sentence; also where packages are missing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quaver.train import config as recipe_name
from quaver.train import memory
from quaver.train.commands.cli import app
from quaver.train.config import TrainConfig, read_run, read_toml, to_toml
from quaver.train.loop import run_training
from quaver.train.metrics import read
from tests import forked
from tests.train.conftest import MakeConfig


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="quaver")


def assert_refused(result: Result, message: str) -> None:
    """Check for one sentence on stderr, exit code 1, and no exception that typer had to catch."""
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr


@pytest.fixture
def toml(make_config: MakeConfig, tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(to_toml(make_config(steps=1)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "meta"], "the device 'meta' is not available (quaver trains on cpu and cuda)"),
        (["--framework", "jax", "--device", "cpu:-1"], "the device 'cpu:-1' is not available to JAX"),
        (["--batch", "1000000000000"], "of memory; take a smaller --model, --batch, --accumulate or --sequence"),
        (["--accumulate", "1000000000000"], "of memory; take a smaller"),
        (["--model", "llama3-70b", "--batch", "100"], "for the weights of llama3-70b with their gradients"),
        (["--batch", "9" * 400], "it must be at most 9223372036854775807"),
        (["--threads", "1000"], "cores; give"),
        (["--vocab", "1000000000000"], "it must be at most 1048576"),
        (["--recipe", "mxfp8(x={[]:1})"], "cannot be read; write NAME or NAME(option=value, ...)"),
        (["--recipe", "mxfp8(x=" + "-" * 400 + "1)"], "cannot be read; write NAME or NAME(option=value, ...)"),
        (["--text", "/dev/zero"], "/dev/zero is a pipe, a device or a socket"),
        (["--config", "/dev/zero"], "cannot read the configuration /dev/zero"),
        (["--out", "a\udcffb"], "which is not valid Unicode text"),
    ],
)
def test_an_impossible_option_gives_one_clear_error(
    toml: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert_refused(quaver("train", "--config", toml, "--quiet", *arguments), message)
    assert not (tmp_path / "run").exists()


def test_a_pipe_is_not_read_for_ever(toml: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for option in ("--text", "--config"):
        assert_refused(
            quaver("train", "--config", toml, "--quiet", option, tmp_path / "pipe"), "pipe is a pipe, a device"
        )


@pytest.mark.parametrize(("option", "number"), [("--tokens", "9" * 30), ("--micro-batches", "-1")])
def test_a_plan_of_too_many_tokens_gives_one_clear_error(option: str, number: str) -> None:
    result = quaver("plan", "--gpu", "h100", "--model", "tiny", "--recipe", "mxfp8", option, number)
    assert_refused(result, "give a number from 1 to 1000000000000")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = " + "[" * 9000, "nested too deeply"),
        ("batch = " + "9" * 5000, "is not valid TOML"),
        ("batch = 0x" + "f" * 5000, "batch is a number of thousands of digits; it must be at most"),
        ("lr = 0x" + "f" * 5000, "lr = a number of thousands of digits is too large"),
        ('out = "a\\u0000"', "which is not valid Unicode text"),
    ],
)
def test_an_odd_configuration_gives_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(content)
    assert_refused(quaver("train", "--config", tmp_path / "c.toml"), message)


def test_every_character_of_an_option_comes_back_from_its_file(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("".join(map(chr, range(1, 0x2100))))
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_toml(tmp_path / "c.toml")["out"] == config.out


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "null",
        "x",
        "[" * 9000,
        '{"step": "1", "seconds": 1}',
        '{"step": 1}',
        '{"step": 1, "seconds": 1, "loss": []}',
    ],
)
def test_a_metrics_file_of_another_shape_gives_one_clear_error(toml: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "loss": 2.0}\n' + line + "\n")
    assert_refused(quaver("train", "--config", toml, "--quiet"), "restore it, or delete that line")
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is not"):
        read(tmp_path / "run" / "metrics.jsonl")


def test_a_checkpoint_of_another_model_is_not_built_first(make_config: MakeConfig) -> None:
    run = run_training(make_config(steps=1)).folder
    path = run / "config.toml"
    path.write_text(to_toml(replace(TrainConfig(**read_toml(path)), model="llama3-70b")))
    assert_refused(
        quaver("generate", run, "--prompt", "7"),
        "does not fit llama3-70b, as the run's config.toml has it: it is one of 'nano'",
    )


def test_a_file_of_options_that_was_changed_is_refused_where_its_run_is_read(make_config: MakeConfig) -> None:
    run = run_training(make_config(steps=1)).folder
    path = run / "config.toml"
    assert read_run(path) == read_toml(path)
    path.write_text(path.read_text().replace("beta2 = 0.95", "beta2 = 0.96"))
    message = "config.toml is not as the run wrote it; restore it, or delete its last line"
    assert_refused(quaver("train", "--resume", "--out", run, "--steps", "2"), message)
    assert_refused(quaver("generate", run, "--prompt", "7"), message)
    # A new run may start from the changed file, and its own run reads it once the digest is deleted.
    assert read_toml(path)["beta2"] == 0.96
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert read_run(path)["beta2"] == 0.96


def test_options_that_change_a_run_are_reported_on_the_terminal(toml: Path, tmp_path: Path) -> None:
    assert quaver("train", "--config", toml, "--quiet").exit_code == 0
    command = [sys.executable, "-m", "quaver.train", "train", "--resume", "--out", str(tmp_path / "run"), "--quiet"]
    process = forked.quick.Popen([*command, "--lr", "0.5", "--steps", "2"], stderr=subprocess.PIPE)
    errors = process.communicate()[1].decode()
    assert process.returncode == 0, errors
    assert errors.startswith("the run goes on from step 1 with other options: lr 0.5 (was 0.005, the model's own)")


def test_available_memory_respects_machine_and_process_limits() -> None:
    assert 1 << 28 < memory.available() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with (
        pytest.raises(ValueError, match="there is not enough memory; take a smaller --batch"),
        memory.out_of_memory_hint("--batch"),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    with pytest.raises(RuntimeError, match="another"), memory.out_of_memory_hint("--batch"):
        raise RuntimeError("another")


def without(packages: str, code: str) -> Any:
    """Run code where packages cannot be imported."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({packages.split()!r}))\n"
    return forked.bare("jax").run([sys.executable, "-c", hide + code], capture_output=True, text=True)


def test_the_command_without_its_extras_says_what_to_install() -> None:
    done = without("tokenizers typer", "from quaver.train.__main__ import main; main()")
    assert done.returncode == 1 and done.stderr == (
        "quaver's commands need tokenizers, typer, not installed here: pip install 'quaver[train]' (or "
        "'quaver[train-jax]', without PyTorch)\n"
    )
    done = without("filelock", "from quaver.train import run_training")
    assert done.stderr.splitlines()[-1].startswith("ImportError: quaver's commands need filelock, not installed here")


@pytest.mark.parametrize(
    ("module", "package", "message"),
    [
        ("quaver.torch", "torch", "quaver.torch needs PyTorch, which is not installed: pip install 'quaver[torch]'"),
        ("quaver.torch.linear.linear", "torch", "quaver.torch needs PyTorch, which is not installed"),
        ("quaver.jax", "jax", "quaver.jax needs JAX, which is not installed: pip install 'quaver[jax]'"),
        ("quaver.jax.linen", "flax", "quaver.jax.linen needs Flax, which is not installed: pip install 'quaver[flax]'"),
        (
            "quaver.compat.transformer_engine.jax",
            "flax",
            "quaver.compat.transformer_engine.jax needs Flax, which is not",
        ),
        ("quaver.jax.nnx", "flax", "quaver.jax.nnx needs Flax, which is not installed: pip install 'quaver[flax]'"),
    ],
)
def test_a_front_end_without_its_framework_says_what_to_install(module: str, package: str, message: str) -> None:
    done = without(package, f"import {module}")
    assert f"ModuleNotFoundError: {message}" in done.stderr.splitlines()[-1]


def test_a_list_of_recipes_is_split_in_the_time_that_it_takes_to_read_it() -> None:
    assert recipe_name.split_recipes("a(" + "," * 200_000) == ["a(" + "," * 200_000]
    assert recipe_name.split_recipes("," * 200_000) == []
