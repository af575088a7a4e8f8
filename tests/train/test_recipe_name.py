from dataclasses import replace
from typing import Any

import pytest

import quaver.recipes
from quaver.recipes.schedule import Schedule
from quaver.recipes.text import folder_name
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig, lr_at


def test_a_list_splits_outside_parentheses() -> None:
    text = "bf16, delayed(history=4, margin=1),mxfp8"
    assert recipe_name.split_recipes(text) == ["bf16", "delayed(history=4, margin=1)", "mxfp8"]


@pytest.mark.parametrize("name", quaver.recipes.RECIPES)
def test_every_recipe_is_found_by_name(name: str) -> None:
    assert recipe_name.find_recipe(name) == quaver.recipes.get(name)


def test_options_reach_the_recipe() -> None:
    assert recipe_name.find_recipe("delayed(history=4)") == quaver.recipes.delayed(history=4)


@pytest.mark.parametrize("text", ["", "a b", "delayed(4)", "delayed(history=x)", "delayed(**{})", "__import__('os')"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        recipe_name.find_recipe(text)


def test_a_schedule_is_one_of_a_list_and_no_recipe() -> None:
    schedule = "nvfp4 until 85%, bf16"
    assert recipe_name.split_recipes(f"bf16, {schedule}, mxfp8") == ["bf16", schedule, "mxfp8"]
    with pytest.raises(ValueError, match="changes over a run, and here is no run; give the recipe of one part"):
        recipe_name.find_recipe(schedule)
    assert [part.recipe.name for part in recipe_name.parse_phases(schedule)] == ["nvfp4", "bf16"]


@pytest.mark.parametrize("steps", [300, 1000])
@pytest.mark.parametrize("percent", [97, 50, 10, 1])
def test_where_the_learning_rate_falls_is_known_before_the_run(steps: int, percent: int) -> None:
    config = TrainConfig(recipe=f"nvfp4 until lr<{percent}%, bf16", steps=steps)
    schedule = recipe_name.schedule_of(config)
    end = schedule.parts[0].end
    known = recipe_name.end_as_step(end, 1.0, replace(config, lr=1.0))
    assert known is not None
    rates = [lr_at(step, replace(config, lr=1.0)) for step in range(1, steps + 1)]
    parts = []
    unit = Schedule(schedule.parts, steps=steps, peak=1.0)
    for step, lr in enumerate(rates, 1):
        unit.at(step, lr=lr)
        parts.append(unit.part)
    assert parts.index(1) == known.value, "the step after the last is the first of the next part"


@pytest.mark.parametrize(
    "options", [{"final_lr": 0.1}, {"steps": 20}, {"steps": 20, "warmup": 2**62}, {"steps": 2**62, "final_lr": 1.0}]
)
def test_a_learning_rate_that_never_falls_so_far_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'until lr<10%' never comes: in .* give a larger share, or a lower --final-"):
        recipe_name.schedule_of(TrainConfig(recipe="nvfp4 until lr<10%, bf16", **options))


def test_folders_are_plain_and_distinct() -> None:
    assert folder_name('delayed(history=16, format="e4m3")') == "delayed-history=16,format=e4m3"
    name = folder_name("mxfp8 until 10, nvfp4 until  lr<10%, bf16")
    assert name == "mxfp8-until-10,nvfp4-until-lr-below-10pct,bf16"
    texts = ["nvfp4 until 85%, bf16", "nvfp4 until 85, bf16", "nvfp4 until loss<85, bf16", "nvfp4 until lr<85%, bf16"]
    assert len({folder_name(text) for text in texts}) == 4
