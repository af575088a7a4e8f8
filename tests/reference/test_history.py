"""Delayed scaling's window, against a second reading of its rules."""

import numpy as np
import pytest

from quaver.recipes.formats import E4M3, E5M2, Format
from quaver.recipes.spec import Delayed
from quaver.reference.numerics import FLT_MAX
from quaver.reference.operations import factor_from, record, roll
from tests.close import assert_bitwise
from tests.contracts import second_reference
from tests.pairs import pairs

UNSET = np.float32(0)


def fresh(length: int) -> np.ndarray:
    return np.zeros(length, np.float32)


def step(history: np.ndarray, factor: np.float32, amax: float, delayed: Delayed) -> tuple[np.ndarray, np.float32]:
    """Record one amax and end the step."""
    return roll(record(history, amax), factor, delayed, E4M3)


@pytest.mark.parametrize(
    ("fmt", "power_of_two", "algorithm", "length", "margin"),
    pairs([E4M3, E5M2], [True, False], ["max", "most_recent"], [1, 2, 3, 16], [0, 1, -2, 200]),
    ids=str,
)
def test_forty_steps_equal_the_second_reference(
    fmt: Format, power_of_two: bool, algorithm: str, length: int, margin: int
) -> None:
    delayed = Delayed(length=length, margin=margin, algorithm=algorithm)  # type: ignore[arg-type]
    rng = np.random.default_rng(length)
    amaxes = 10.0 ** rng.uniform(-37.5, 38, 40)
    amaxes[rng.random(40) < 0.2] = 0
    history, factor = fresh(length), UNSET
    other, other_factor = [0.0] * length, 0.0
    for n, amax in enumerate(amaxes.astype(np.float32)):
        history, other[0] = record(history, float(amax)), max(other[0], float(amax))
        history, factor = roll(history, factor, delayed, fmt, power_of_two)
        other, other_factor = second_reference.history_step(
            other, other_factor, fmt.max, margin, algorithm, power_of_two
        )
        assert_bitwise(history, np.float32(other), f"history after step {n}")
        assert_bitwise(np.float32(factor), np.float32(other_factor), f"factor after step {n}, amax {amax}")


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_maximum_holds_for_length_steps_and_no_longer(length: int) -> None:
    delayed = Delayed(length=length)
    history, factor = step(fresh(length), UNSET, 448.0, delayed)
    for _ in range(length - 1):
        history, factor = step(history, factor, 1.75, delayed)
        assert factor == 1, "while the 448 is in the window"
    _, factor = step(history, factor, 1.75, delayed)
    assert factor == 256


def test_most_recent_forgets_at_once() -> None:
    delayed = Delayed(length=8, algorithm="most_recent")
    history, factor = step(fresh(8), UNSET, 448.0, delayed)
    assert factor == 1
    assert step(history, factor, 1.75, delayed)[1] == 256


def test_a_step_that_recorded_nothing_changes_nothing() -> None:
    history, factor = step(fresh(4), UNSET, 3.0, Delayed(length=4))
    for amax in (0.0, np.nan, np.inf, -np.inf):
        again, same = step(history, factor, amax, Delayed(length=4))
        assert_bitwise(again, history, f"amax {amax}")
        assert same == factor


def test_an_infinity_or_nan_is_not_recorded() -> None:
    history = record(fresh(3), 2.0)
    for amax in (np.nan, np.inf):
        assert_bitwise(record(history, amax), history)


def test_several_amaxes_in_a_step_record_their_maximum_and_leave_the_old_array_alone() -> None:
    history = fresh(3)
    after = record(record(record(history, 2.0), 5.0), 3.0)
    assert_bitwise(after, np.array([5, 0, 0], np.float32))
    assert_bitwise(history, fresh(3))


@pytest.mark.parametrize("margin, expected", [(0, 1.0), (1, 0.5), (3, 0.125), (500, 2.0**-126), (-500, 2.0**100)])
def test_margin_halves_the_factor_within_its_bounds(margin: int, expected: float) -> None:
    assert factor_from(np.float32(448), Delayed(margin=margin), E4M3, True) == np.float32(expected)


@pytest.mark.parametrize("margin, expected", [(0, 4.48), (1, 2.24), (500, 2.0**-126), (-500, float(FLT_MAX))])
def test_margin_halves_a_divided_factor_within_normal_numbers(margin: int, expected: float) -> None:
    assert factor_from(np.float32(100), Delayed(margin=margin), E4M3, False) == np.float32(expected)
