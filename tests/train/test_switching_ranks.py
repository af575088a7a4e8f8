"""Ranks change their recipe together: the single process's losses, and those of a run that was resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quaver.recipes.schedule import SMOOTHED
from quaver.train.config import TrainConfig
from quaver.train.loop import run_training
from quaver.train.metrics import phase_starts, read
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import DELAYED, PAIR, Resumed, losses_of, plain, recorded, start

COMMON: dict[str, Any] = {"dtype": "float32", "batch": 4, "final_lr": 1.0, "keep": 0, "clip": 0.0}
#: Weights are gathered in high precision and then as codes; and as codes, as other codes and in high precision.
OVER_TIME = {"from-bf16": "bf16 until 3, mxfp8", "between": "tensorwise until 2, mxfp8 until 50%, bf16"}


def records_of(config: TrainConfig) -> list[dict[str, Any]]:
    return read(Path(config.out) / "metrics.jsonl")


def resumed_at(source: TrainConfig, step: int, **options: Any) -> Resumed:
    return Resumed(replace(source, out=f"{source.out}-at-{step}", **options), source, step)


@pytest.mark.ranks
def test_ranks_change_their_recipe_as_the_single_process_does(make_config: MakeConfig, tmp_path: Path) -> None:
    runs = {name: make_config(name, fsdp=2, recipe=text, steps=6, **COMMON) for name, text in OVER_TIME.items()}
    between = runs["between"] = replace(runs["between"], checkpoint_every=1)
    # Its mean loss is below 9 as soon as there is one.
    steps = SMOOTHED + 3
    by_loss = make_config("loss", fsdp=2, recipe="mxfp8 until loss<9, bf16", steps=steps, checkpoint_every=1, **COMMON)
    resumed = [resumed_at(between, step) for step in (1, 2, 3)]
    resumed += [resumed_at(by_loss, step) for step in (SMOOTHED - 1, SMOOTHED)]
    start([*runs.values(), by_loss, *resumed], tmp_path / "two", 2)

    for name, config in runs.items():
        one = plain(config, f"{name}-one", batch=2, accumulate=2)
        run_training(one)
        assert losses_of(recorded(one)) == losses_of(recorded(config)), name
    assert phase_starts(records_of(between)) == {3: 2, 4: 3}
    assert phase_starts(records_of(by_loss)) == {SMOOTHED + 1: 2}
    for config, source, _ in resumed:
        assert recorded(config) == recorded(source), config.out
        assert phase_starts(records_of(config)) == phase_starts(records_of(source))


@pytest.mark.ranks
def test_tensor_and_pipeline_parallel_runs_switch_recipes_as_from_a_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Or as a run under the next recipe alone, which has no schedule."""
    common = COMMON | {"sequence": 64, "model": PAIR, "steps": 4, "checkpoint_every": 2}
    grid = make_config("grid", fsdp=2, tp=2, sp=True, **common)
    staged = make_config("staged", fsdp=2, pp=2, **common | {"batch": 2, "accumulate": 2})
    grid = replace(grid, recipe=f"bf16 until 1, {DELAYED} until 3, mxfp8")
    staged = replace(staged, recipe="tensorwise until 2, mxfp8")
    resumed, alone = resumed_at(grid, 2), resumed_at(staged, 2, recipe="mxfp8")
    start([grid, staged, resumed, alone], tmp_path / "four", 4)
    assert recorded(resumed.config) == recorded(grid)
    assert losses_of(recorded(alone.config)) == losses_of(recorded(staged))
    assert phase_starts(records_of(grid)) == {2: 2, 4: 3} and phase_starts(records_of(staged)) == {3: 2}
