"""Test runs with a recipe change: results, messages, and resuming before, at and after the change."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quaver.recipes.schedule import SMOOTHED
from quaver.train import checkpoint, frameworks
from quaver.train.checkpoint import CheckpointError
from quaver.train.compare import compare_runs
from quaver.train.config import TrainConfig, lr_at
from quaver.train.generate import config_of, generate, saved_recipe
from quaver.train.loop import RecipePhases, TrainResult, run_training
from quaver.train.metrics import phase_starts, read
from tests.train.conftest import MakeConfig

#: Recipes with and without state, in both orders; below 9 is the mean loss once there is one.
OVER_TIME: dict[str, tuple[str, int, dict[int, int]]] = {
    "step": ("delayed(history=4) until 3, nvfp4 until 6, delayed(history=3)", 9, {4: 2, 7: 3}),
    "share": ("nvfp4 until 50%, bf16", 7, {4: 2}),
    "lr": ("mxfp8(attention=True) until lr<60%, nvfp4 until lr<20%, bf16", 9, {6: 2, 8: 3}),
    "loss": ("nvfp4 until loss<9, mxfp8", SMOOTHED + 2, {SMOOTHED + 1: 2}),
}


def all_of(result: TrainResult) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
    return result.losses, result.validation_losses, phase_starts(read(result.folder / "metrics.jsonl"))


def begun_at(config: TrainConfig, step: int, **options: Any) -> TrainConfig:
    """A run in a folder as another one's was after a step."""
    folder = Path(f"{config.out}-at-{step}{''.join(map(str, options.values()))[:9]}")
    shutil.copytree(config.out, folder)
    for later in folder.glob("step-*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    return replace(config, out=str(folder), **options)


@pytest.mark.parametrize("kind", OVER_TIME)
def test_a_run_resumed_before_at_or_after_a_change_is_the_one_never_stopped(kind: str, make_config: MakeConfig) -> None:
    text, steps, changes = OVER_TIME[kind]
    config = make_config(recipe=text, steps=steps, checkpoint_every=1, keep=0)
    whole = run_training(config)
    assert all_of(whole)[2] == changes
    first = min(changes)
    for step in {first - 1, first, max(changes)}:
        assert all_of(run_training(begun_at(config, step), resume=True)) == all_of(whole), step


@pytest.mark.parametrize(
    ("framework", "parts"),
    [("torch", ("nvfp4", "delayed(history=4)", "bf16")), ("jax", ("bf16", "delayed(history=4)"))],
)
def test_after_a_change_training_equals_the_next_recipe_from_the_checkpoint(
    framework: str, parts: tuple[str, ...], make_config: MakeConfig
) -> None:
    text = ", ".join(f"{part} until {2 * number}" for number, part in enumerate(parts[:-1], 1)) + f", {parts[-1]}"
    config = make_config(
        framework=framework, recipe=text, steps=2 * len(parts), checkpoint_every=1, keep=0, validate_every=0
    )
    whole = run_training(config)
    alone = run_training(replace(config, recipe=parts[0], out=f"{config.out}-first"))
    assert {step: whole.losses[step] for step in (1, 2)} == {step: alone.losses[step] for step in (1, 2)}
    for number, recipe in enumerate(parts[1:], 1):
        step = 2 * number
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            other = run_training(begun_at(config, step, recipe=recipe), resume=True)
        under = (step + 1, step + 2)
        assert [other.losses[each] for each in under] == [whole.losses[each] for each in under]
        assert whole.losses[step + 1] != alone.losses[step + 1], "it changes something"
    assert all_of(run_training(begun_at(config, 2), resume=True)) == all_of(whole)


def test_a_change_keeps_weights_and_moments_and_drops_recorded_state(
    make_config: MakeConfig,
) -> None:
    config = make_config(recipe="delayed(history=4) until 2, nvfp4", steps=4)
    precision = RecipePhases(config)
    learner = frameworks.make_learner(config, precision.recipe, 256)
    batch = np.random.default_rng(0).integers(0, 256, (1, 2, 33))
    for step in (1, 2):
        precision.begin(step, learner)
        precision.report_loss({"loss": learner.step(batch, 1e-3)[0]}, frameworks.SingleProcess())
    before = learner.tensors()
    assert any(name.endswith("history") for name in before[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.begin(3, learner)
    after = learner.tensors()
    weights = {name for name in before[0] if name.endswith("weight")}
    assert all((before[0][name] == after[0][name]).all() for name in weights)
    assert all((before[1][name] == after[1][name]).all() for name in before[1])
    assert set(after[0]) - weights == {name for name in after[0] if name.endswith("count")}
    assert {recipe.name for recipe in learner.conversion.converted.values()} == {"nvfp4"}


def test_records_and_checkpoints_name_the_active_part(make_config: MakeConfig) -> None:
    config = make_config(recipe="mxfp8 until 50%, bf16", steps=4, checkpoint_every=2, validate_every=2, keep=0)
    folder = run_training(config).folder
    records = [record for record in read(folder / "metrics.jsonl") if "loss" in record]
    assert [record["part"] for record in records] == [1, 1, 2, 2]
    saved = [checkpoint.read_state(folder / f"step-00000{step}")["schedule"] for step in (2, 4)]
    assert [state["part"] for state in saved] == [0, 1]
    assert saved[1]["highest_lr"] == max(lr_at(step, config) for step in range(1, 5))
    assert saved_recipe(folder, config_of(folder)).name == "bf16" and generate(folder, "3 times", tokens=2).tokens
    shutil.rmtree(folder / "step-000004")
    assert saved_recipe(folder, config_of(folder)).name == "mxfp8"
    plain = run_training(make_config("plain", steps=1)).folder
    assert "part" not in read(plain / "metrics.jsonl")[0]


def test_a_run_resumes_with_the_same_or_another_schedule(make_config: MakeConfig) -> None:
    """Its position in the schedule follows from its step and learning rate."""
    config = make_config(recipe="nvfp4", steps=8, warmup=2, checkpoint_every=1, keep=0)
    run_training(config)
    for step, text, changes in (
        (2, "nvfp4 until 5, bf16", {6: 2}),
        (6, "nvfp4 until 5, bf16", {}),
        (4, "nvfp4 until lr<50%, bf16", {6: 2}),
        (7, "nvfp4 until lr<50%, bf16", {}),
    ):
        with pytest.warns(UserWarning, match=f"goes on from step {step} with other options: recipe 'nvfp4 until"):
            result = run_training(begun_at(config, step, recipe=text), resume=True)
        records = read(result.folder / "metrics.jsonl")
        assert phase_starts(records) == changes and records[-2]["part"] == 2


def test_a_checkpoint_with_an_invalid_schedule_gives_a_clear_error(make_config: MakeConfig) -> None:
    config = make_config(recipe="mxfp8 until 2, bf16", steps=3)
    folder = run_training(config).folder
    state = checkpoint.read_state(folder / "step-000003")
    for schedule in ({"part": 7}, {**state["schedule"], "part": 2}, [], 3):
        with pytest.raises(CheckpointError, match=r"of step 3 does not fit: the state (is|of a schedule)"):
            RecipePhases(config).resume_from({**state, "schedule": schedule})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nvfp4 until 10, bf16"}, "'nvfp4 until 10' leaves no step for 'bf16': it ends with step 10"),
        ({"recipe": "nvfp4 until lr<10%, bf16", "final_lr": 0.1}, "'until lr<10%' never comes: in 10 steps, with warm"),
        (
            {"recipe": "nvfp4 until lr<10%, mxfp8 until 5, bf16"},
            "'mxfp8 until 5' has no step: it ends with step 5, which is not after step 9, where 'nvfp4 until lr<10%'",
        ),
        ({"loss_chunk": 64, "recipe": "bf16 until 5, mxfp8", "framework": "jax"}, "JAX cannot take the loss in chunks"),
    ],
)
def test_unsupported_runs_are_refused_before_they_start(
    options: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    config = make_config(**options)
    with pytest.raises(ValueError) as error:
        run_training(config)
    assert message in str(error.value) and not Path(config.out).exists()
    with pytest.raises(ValueError) as error:
        compare_runs(replace(config, recipe="bf16"), [options["recipe"]])
    assert message in str(error.value) and not Path(config.out).exists()


@pytest.mark.usefixtures("forked_runs")
def test_a_comparison_has_a_schedule_as_one_recipe(make_config: MakeConfig) -> None:
    texts = ["nvfp4 until 50%, bf16", "nvfp4 until 5, bf16"]
    config = make_config(steps=6, validate_every=0)
    done = compare_runs(config, texts, jobs=1)
    assert not done.failures and done.recipes == ["bf16", "null", *texts]
    folders = {path.parent.name for path in Path(config.out).glob("*/metrics.jsonl")}
    assert folders == {"bf16-seed0", "null-seed0", "nvfp4-until-50pct,bf16-seed0", "nvfp4-until-5,bf16-seed0"}
    assert [run.changes for run in done.runs] == [(), (), (4,), (6,)]
    assert all(len(run.losses) == 6 for run in done.runs)
