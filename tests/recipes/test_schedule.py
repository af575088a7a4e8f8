"""Precision over time: the grammar of `until`, what ends a part, and going on from any step."""

import copy
import json
import math
from itertools import pairwise
from random import Random

import pytest

from quaver import recipes
from quaver.recipes.schedule import FORMS, SMOOTHED, Schedule
from quaver.recipes.text import items, pieces

#: One end of each kind.
ENDS = {"step": "7", "share": "12.5%", "loss": "loss<1.9", "lr": "lr<10%"}
OPTIONS = "nvfp4(stochastic_rounding=False, hadamard=True)"


def parts_of(schedule: Schedule, rates: list[float], losses: list[float], start: int = 0) -> list[int]:
    """The part of each step after `start`."""
    parts = []
    for step in range(start + 1, len(rates) + 1):
        schedule.at(step, lr=rates[step - 1])
        schedule.record_loss(losses[step - 1])
        parts.append(schedule.part)
    return parts


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_alone_is_in_force_all_the_time(name: str) -> None:
    schedule = recipes.schedule(name)
    assert schedule.text == name and not schedule.by_loss
    assert {schedule.at(step) for step in (1, 2, 1000)} == {recipes.get(name)}


def test_every_end_of_every_recipe_is_read_back() -> None:
    assert set(ENDS) == set(FORMS)
    for first in (*recipes.RECIPES, OPTIONS):
        for kind, end in ENDS.items():
            text = f"{first} until {end}, {OPTIONS} until 99%, bf16"
            schedule = recipes.schedule(text, steps=1000, peak=1.0)
            assert schedule.text == text and [part.recipe for part in schedule.parts] == [
                recipes.get(first),
                recipes.nvfp4(stochastic_rounding=False),
                recipes.bf16(),
            ]
            last = schedule.parts[0].end
            assert last is not None and last.kind == kind
            loose = recipes.schedule(text.replace(" until ", "   until  ").replace("<", " < "), steps=1000, peak=1.0)
            assert [p.end and (p.end.kind, p.end.value) for p in loose.parts] == [
                p.end and (p.end.kind, p.end.value) for p in schedule.parts
            ]


def test_in_a_list_a_part_with_until_extends_to_the_next_comma() -> None:
    text = f"bf16, nvfp4 until 85%, bf16,mxfp8,, {OPTIONS} until  5,mxfp8 until loss<1.9 , delayed(history=4, margin=1)"
    assert list(items(text)) == [
        *("bf16", "nvfp4 until 85%, bf16", "mxfp8"),
        f"{OPTIONS} until 5, mxfp8 until loss<1.9, delayed(history=4, margin=1)",
    ]
    # The last item is not changed, so that `schedule` reports what is missing.
    assert list(items("bf16, nvfp4 until 85%")) == ["bf16", "nvfp4 until 85%"]
    assert pieces("a(b, (c, d)), e") == ["a(b, (c, d))", "e"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvfp4, bf16", "does not say where 'nvfp4' ends: each but the last has until STEP, until SHARE%, until loss<"),
        ("nvfp4 until 85%", "does not say what follows 'nvfp4 until 85%'; write the recipe of the steps after it"),
        ("nvfp4 until 85%,", "has a part without a recipe; write one as 'nvfp4 until 85%, bf16'"),
        ("until 85%, bf16", "has a part without a recipe"),
        ("", "has a part without a recipe"),
        ("nvfp4 until soon, bf16", "'until soon' is no end of a part; write until STEP, until SHARE%, until loss<NATS"),
        ("nvfp4 until 85, bf16, mxfp8", "does not say where 'bf16' ends"),
        ("nvfp4 until loss<1.9%, bf16", "'until loss<1.9%' is no end of a part"),
        ("nvfp4 until lr<0.1, bf16", "'until lr<0.1' is no end of a part"),
        ("nvfp4 until 100%, bf16", "'until 100%' is a share; give one between 0% and 100%"),
        ("nvfp4 until 0%, bf16", "'until 0%' is a share; give one between 0% and 100%"),
        ("nvfp4 until 0, bf16", "'until 0' ends before the first step; give more"),
        ("nvfp4 until loss<0, bf16", "'until loss<0' ends before the first step; give more"),
        ("nvfp4 until 0.1%, bf16", "'nvfp4 until 0.1%' has no step: it ends with step 0, and there are 300 steps"),
        ("nvfp4 until 300, bf16", "'nvfp4 until 300' leaves no step for 'bf16': it ends with step 300, and there are"),
        (
            "nvfp4 until 85%, mxfp8 until loss<2, delayed until 255, bf16",
            "'delayed until 255' has no step: it ends with step 255, which is not after step 255, where 'nvfp4 until",
        ),
        ("nvfp until 85%, bf16", "no recipe 'nvfp'; did you mean 'nvfp4'?"),
        ("delayed(histori=3) until 85%, bf16", "has no option 'histori'; did you mean 'history'?"),
        ("nvfp4 until until 85%, bf16", "'until until 85%' is no end of a part"),
        (", ".join(["bf16 until 5"] * 200), "has 200 parts; give at most 100"),
    ],
)
def test_an_invalid_schedule_gives_an_error_that_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        recipes.schedule(text, steps=300, peak=1.0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_quantity_that_ends_a_part_must_be_given() -> None:
    with pytest.raises(ValueError, match="is a share of a run's steps; give steps="):
        recipes.schedule("nvfp4 until 85%, bf16")
    for peak in (None, 0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="is a share of the highest learning rate; give peak=, above 0"):
            recipes.schedule("nvfp4 until lr<10%, bf16", peak=peak)
    with pytest.raises(ValueError, match=r"needs each step's learning rate: give at\(step, lr=...\)"):
        recipes.schedule("nvfp4 until lr<10%, bf16", peak=1.0).at(1)
    schedule = recipes.schedule("nvfp4 until loss<2, bf16")
    schedule.at(1)
    with pytest.raises(ValueError, match=r"the loss of step 1 is missing: call record_loss\(loss\) after each step"):
        schedule.at(2)
    schedule.record_loss(3.0)
    with pytest.raises(ValueError, match="called for step 1, and now for 1; call it once per step"):
        schedule.at(1)


def test_parts_given_by_step_or_fraction_end_exactly_there() -> None:
    for steps in (2, 3, 7, 20, 100, 1000, 2**62):
        for percent in (1, 29, 50, 57, 85, 99):
            last = percent * steps // 100
            if last == 0:
                continue
            schedule = recipes.schedule(f"nvfp4 until {percent}%, bf16", steps=steps)
            assert schedule.at(last).name == "nvfp4" and schedule.at(last + 1).name == "bf16"
    assert parts_of(recipes.schedule("nvfp4 until 3, bf16"), [1.0] * 6, [1.0] * 6) == [0, 0, 0, 1, 1, 1]


def test_low_learning_rates_during_warm_up_end_no_part() -> None:
    rates = [0.05, 0.5, 1.0, 0.6, 0.2, 0.1, 0.0999, 0.05, 0.3]
    parts = parts_of(recipes.schedule("nvfp4 until lr<10%, bf16", peak=1.0), rates, rates)
    assert parts == [0, 0, 0, 0, 0, 0, 1, 1, 1], "it falls below at the seventh step, and does not come back"
    # Each share has a rise of its own to wait for.
    two = recipes.schedule("mxfp8 until lr<50%, nvfp4 until lr<10%, bf16", peak=1.0)
    assert parts_of(two, rates, rates) == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert parts_of(recipes.schedule("nvfp4 until lr<10%, bf16", peak=1.0), [0.01] * 5, [1.0] * 5) == [0] * 5


def test_a_loss_is_the_mean_of_the_last_steps_and_of_no_fewer() -> None:
    schedule = recipes.schedule("nvfp4 until loss<1.5, bf16")
    losses = [0.0] * (SMOOTHED - 1) + [1.5 * SMOOTHED - 1e-9, *[2.0] * 40]
    # Zeros alone are too few; then the mean is a little below, and the next step is the first of the next part.
    assert parts_of(schedule, losses, losses).index(1) == SMOOTHED
    above = [1.5] * SMOOTHED
    assert parts_of(recipes.schedule("nvfp4 until loss<1.5, bf16"), above, above) == [0] * SMOOTHED, "it is not below"


def test_a_part_that_has_already_ended_is_left_out() -> None:
    schedule = recipes.schedule("mxfp8 until lr<50%, nvfp4 until 3, bf16", peak=1.0)
    assert parts_of(schedule, [1.0, 1.0, 1.0, 0.4, 0.3], [1.0] * 5) == [0, 0, 0, 2, 2]


def test_going_on_from_any_step_is_never_having_stopped() -> None:
    text = "mxfp8 until 10%, tensorwise until loss<2.2, nvfp4 until lr<30%, rowwise until loss<1.2, bf16"
    for seed in range(20):
        random, steps = Random(seed), 120
        rates = [min(step / 20, 1.05 - step / steps) * 3e-4 for step in range(1, steps + 1)]
        losses = [3 * math.exp(-step / 60) + random.gauss(0, 0.3) for step in range(steps)]

        def fresh(steps: int = steps) -> Schedule:
            return recipes.schedule(text, steps=steps, peak=3e-4)

        schedule, states = fresh(), []
        whole = []
        for step in range(1, steps + 1):
            schedule.at(step, lr=rates[step - 1])
            schedule.record_loss(losses[step - 1])
            whole.append(schedule.part)
            states.append(json.dumps(schedule.state_dict()))
        assert whole == parts_of(copy.deepcopy(fresh()), rates, losses)
        assert all(a <= b for a, b in pairwise(whole)) and len(set(whole)) > 3
        for start in (1, 11, 12, 13, *(step for step in range(1, steps) if whole[step] != whole[step - 1])):
            resumed = fresh()
            resumed.load_state_dict(json.loads(states[start - 1]))
            assert parts_of(resumed, rates, losses, start) == whole[start:]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"part": 2, "step": 1, "highest_lr": 0.0, "losses": []},
        {"part": -1, "step": 1, "highest_lr": 0.0, "losses": []},
        {"part": 0, "step": None, "highest_lr": 0.0, "losses": []},
        {"part": 0, "step": 1, "highest_lr": "1", "losses": []},
        {"part": 0, "step": 1, "highest_lr": 0.0, "losses": [None]},
        {"part": 0, "step": 1, "highest_lr": 0.0, "losses": 3},
    ],
)
def test_a_state_of_another_schedule_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"the state (is|of a schedule is)|the state is of part"):
        recipes.schedule("nvfp4 until 3, bf16").load_state_dict(state)
