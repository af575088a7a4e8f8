"""Test that every option changes the results of a run, is refused, or warns that it has no effect."""

import json
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quaver.train import loop
from quaver.train.config import TrainConfig
from quaver.train.loop import run_training
from tests.train.conftest import MakeConfig

#: Another value of each option.
OTHER: dict[str, Any] = {
    **{"recipe": "tensorwise", "model": "nano-gpt2", "text": ("README.md",), "tokens": "bpe", "vocab": 300, "steps": 3},
    **{"batch": 3, "sequence": 40, "accumulate": 2, "lr": 0.01, "final_lr": 0.5, "warmup": 2, "weight_decay": 0.3},
    **{"optimizer": "lean", "optimizer_offload": "cpu", "pp_schedule": "GPipe", "pp_stages": 2},
    **{"beta1": 0.5, "beta2": 0.5, "clip": 0.1, "seed": 4, "framework": "jax", "dtype": "float32", "device": "cuda"},
    **{"recompute": "full", "fsdp": 2, "pp": 2, "cp": 2, "cp_how": "ring", "tp": 2, "sp": True, "timeout": 40},
    **{"loss_chunk": 16, "capture": "step", "threads": 2, "out": "elsewhere", "validate_every": 1, "keep": 1},
    **{"capacity": 1.5},
    **{"validation_batches": 3, "checkpoint_every": 1, "async_save": True, "report_to": ("tensorboard",)},
    **{"inspect_every": 1, "nudge": 0.1},
}
#: Options that other tests check: of speed, memory and place, and the other framework, whose compiler is slow.
ELSEWHERE = ("threads", "recompute", "loss_chunk", "out", "framework", "report_to", "model")


def run_outcome(config: TrainConfig) -> Any:
    """Records without times, and file names; or the error message. Also the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            result = run_training(config)
        except ValueError as error:
            return str(error), []
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    times = ("seconds", "tokens_per_second")
    records = [{key: value for key, value in json.loads(line).items() if key not in times} for line in lines]
    files = sorted(str(path.relative_to(result.folder)) for path in result.folder.rglob("*"))
    return (records, files), [str(each.message) for each in seen if "has no effect here" in str(each.message)]


def test_an_option_has_an_effect_or_a_warning_says_that_it_has_none(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    base = make_config(
        "base", steps=2, warmup=1, batch=2, sequence=16, checkpoint_every=0, validate_every=0, validation_batches=1
    )
    expected, warned = run_outcome(base)
    assert not warned and OTHER.keys() == {field.name for field in fields(TrainConfig)}, "give a new option a value"
    for name, value in OTHER.items():
        if name in ELSEWHERE:
            continue
        try:
            config = replace(base, **{"out": str(tmp_path / "runs" / name), name: value})
        except ValueError:
            continue  # refused
        before = expected
        if name == "keep":
            before, _ = run_outcome(replace(base, out=str(tmp_path / "saved"), checkpoint_every=1))
            config = replace(config, checkpoint_every=1)
        left, warned = run_outcome(config)
        if left == before:
            assert len(warned) == 1 and warned[0].startswith(f"{name} is "), f"{name} has no effect, and no warning"
        else:
            assert not warned, warned


def test_warnings_about_ignored_options_are_correct(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each row: the warning comes with the other value only, and not where the option has an effect."""
    monkeypatch.setattr(loop.frameworks, "runs_on_cpu", lambda config: config.device == "cpu")
    config = make_config(steps=4, warmup=1)
    working: dict[str, tuple[dict[str, Any], int]] = {
        "vocab": ({"tokens": "bpe"}, 1),
        "final_lr": ({}, 1),
        "beta2": ({"optimizer": "lion"}, 1),
        "optimizer_offload": ({"device": "cuda"}, 1),
        "capture": ({}, 1),
        "cp_how": ({"cp": 2}, 2),
        "async_save": ({}, 2),
        "timeout": ({}, 2),
    }
    resting: dict[str, dict[str, Any]] = {
        "final_lr": {"warmup": 4},
        "beta2": {"optimizer": "sgd"},
        "capture": {"framework": "jax"},
    }
    assert loop.WHY_IDLE.keys() == working.keys()
    for name, (options, ranks) in working.items():
        other = replace(config, **{name: OTHER[name]})
        assert not [*loop.idle_options(replace(other, **options), ranks)], name
        (message,) = loop.idle_options(replace(other, **resting.get(name, {})), 1)
        assert message.startswith(f"{name} is {OTHER[name]!r}, which has no effect here: "), message
        assert not [*loop.idle_options(replace(config, **resting.get(name, {})), 1)], name
    frozen = replace(config, vocab=300, tokens="learnt.json", text=("text.safetensors",))
    assert not [*loop.idle_options(frozen, 1)], "a comparison has learnt them"
