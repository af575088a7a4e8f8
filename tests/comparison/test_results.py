"""Statistics of a comparison: Student's t, and a verdict for each place of an interval."""

import pytest

from quaver.comparison import ComparedRun, Comparison
from quaver.comparison.results import last_tenth, paired, t_95


def compared(differences: dict[str, list[float]], margin: float = 0.01) -> Comparison:
    """Runs of ten steps whose last loss is 2, and 2 plus a difference per seed; the other losses are far off."""
    names = {"bf16": [0.0] * len(next(iter(differences.values()))), **differences}
    runs = []
    for name, values in names.items():
        for seed, value in enumerate(values):
            losses = dict.fromkeys(range(1, 10), 5.0 + value * 100) | {10: 2 + value}
            runs.append(ComparedRun(recipe=name, seed=seed, losses=losses, final=last_tenth(list(losses.values()))))
    return Comparison(runs=tuple(runs), margin=margin)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.7062047),
        (2, 4.30265273),
        (3, 3.18244631),
        (4, 2.77644511),
        (9, 2.26215716),
        (10, 2.22813885),
        (30, 2.04227246),
        (100, 1.98397152),
        (1000, 1.96233908),
    ],
)
def test_students_t_agrees_with_published_tables(freedom: int, t: float) -> None:
    assert t_95(freedom) == pytest.approx(t, rel=1e-8)


def test_students_t_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 300):
        assert t_95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-11), freedom


@pytest.mark.parametrize(("steps", "averaged"), [(1, 1), (9, 1), (10, 1), (11, 2), (100, 10)])
def test_the_last_tenth_is_rounded_up(steps: int, averaged: int) -> None:
    losses = [100.0] * (steps - averaged) + [float(step) for step in range(averaged)]
    assert last_tenth(losses) == (averaged - 1) / 2


def test_too_few_differences_have_no_error() -> None:
    assert paired([]) == (None, None) and paired([0.5]) == (0.5, None)


@pytest.mark.parametrize(
    ("differences", "half", "verdict"),
    [
        # Half an interval of two seeds is 12.7062 standard errors; one is half the distance of the two.
        ([0.001, 0.002], 0.0063531, "equivalent to bf16 within ±0.01 nats (n = 2)"),
        ([0.0040, 0.0041], 0.00063531, "equivalent to bf16 within ±0.01 nats (n = 2)"),
        ([-0.001, 0.001], 0.0127062, "undecided: more seeds"),
        ([0.0, 0.02], 0.127062, "undecided: more seeds"),
        ([0.1, 0.102], 0.0127062, "different"),
        ([-0.1, -0.102], 0.0127062, "different"),
        # Partly beyond the margin, and not 0.
        ([0.009, 0.0095], 0.00317655, "different"),
        ([0.001, 0.002, 0.003], 4.30265273 * 0.001 / 3**0.5, "equivalent to bf16 within ±0.01 nats (n = 3)"),
    ],
)
def test_the_verdict_is_on_the_whole_interval(differences: list[float], half: float, verdict: str) -> None:
    row = compared({"mine": differences}).row("mine")
    mean = sum(differences) / len(differences)
    assert row["difference"] == pytest.approx(mean)
    assert (row["low"], row["high"]) == pytest.approx((mean - half, mean + half), rel=1e-4)
    assert row["verdict"] == verdict


def test_another_margin_is_another_verdict() -> None:
    assert compared({"mine": [0.1, 0.1001]}, 0.2).row("mine")["verdict"].startswith("equivalent to bf16 within ±0.2")


def test_a_null_run_that_is_not_equivalent_is_said_to_decide_nothing() -> None:
    notes = compared({"null": [-0.05, 0.05], "mine": [0.0, 0.001]}).notes
    assert any("null itself is not within ±0.01 nats" in note for note in notes)
    assert not any("itself" in note for note in compared({"null": [-0.0001, 0.0001]}).notes)


def test_the_table_prints_a_row_per_recipe() -> None:
    lines = str(compared({"null": [0.0, 1e-6], "mine": [0.1, 0.102]})).splitlines()
    assert lines[0] == "Mean loss of the last 10 % of steps, nats"
    assert lines[1].split() == ["recipe", "n", "loss", "minus", "bf16", "95", "%", "interval", "verdict"]
    assert lines[2].split() == ["bf16", "2", "2.0000"]
    assert lines[3].split()[:4] == ["null", "2", "2.0000", "+5e-7"]
    assert lines[4].split() == ["mine", "2", "2.1010", "+0.1010", "+0.0883", "to", "+0.1137", "different"]
