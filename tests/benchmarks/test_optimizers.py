"""The tables of docs/optimizer.md and docs/design/optimizer.md, and the rules of optimizers and schedules."""

from pathlib import Path

import pytest

from benchmarks.acceptance import open_loop, optimizers, scheduled, training
from benchmarks.acceptance.command import Plan
from benchmarks.acceptance.report import Acceptance
from benchmarks.acceptance.training import BAD_STATES, FLOAT32_STATES, NULL, Outcome
from benchmarks.measuring import results
from quaver.reference.optimizer_state import PRESETS


def test_both_pages_have_their_marks() -> None:
    page = optimizers.PAGE.read_text(encoding="utf-8")
    for mark in (optimizers.BEGIN, optimizers.END, *open_loop.MARKS):
        assert page.count(mark) == 1
    once = results.between(page, optimizers.BEGIN, optimizers.END, ["x"])
    assert results.between(once, optimizers.BEGIN, optimizers.END, ["x"]) == once != page
    with pytest.raises(ValueError, match="lacks the line"):
        results.between("", optimizers.BEGIN, optimizers.END, ["x"])


def test_the_summary_table_matches_each_entry_of_the_page() -> None:
    page = optimizers.PAGE.read_text(encoding="utf-8")
    lines = optimizers.summary(page)
    assert "\n".join(lines) in optimizers.SUMMARY.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in lines[2:]}
    assert rows.keys() == PRESETS.keys()
    assert " 5.078 " in rows["lean"] and "±" in rows["lean"] and "±" in rows["balanced"]
    # A preset that clamps its updates has the error of clamped ones, another its own.
    assert rows["lean"].count("clamped") == 1 and "clamped" not in rows["msamp"]


def acceptance_of(plan: Plan, losses: dict[str, tuple[float | None, ...]], clamped: int = 0) -> Acceptance:
    outcomes = {
        (row, plan.first + i): Outcome(
            loss=loss, failure="" if loss is not None else "NaN", clamped=clamped, updates=10
        )
        for row, each in losses.items()
        for i, loss in enumerate(each)
    }
    return Acceptance(
        steps=plan.steps,
        seeds=plan.seeds,
        first=plan.first,
        model=plan.model,
        text="",
        recipes=plan.recipes,
        rules=plan.rules,
        also={scheduled.SCHEDULE: scheduled.ALONE, scheduled.LATE: scheduled.ALONE},
        verdict=plan.verdict,
        outcomes=outcomes,
    )


def test_optimizers_are_judged_by_loss_and_clamped_updates() -> None:
    def accepted(clamped: int = 0, **losses: float | None) -> bool:
        own = {FLOAT32_STATES: 2.0, NULL: 2.001, "balanced": 2.002, "lean": 1.999, BAD_STATES: 2.5, "adamw": 2.0}
        pairs = {row: (loss, loss) for row, loss in {**own, **losses}.items()}
        return acceptance_of(optimizers.plan(seeds=2), pairs, clamped).accepted

    assert accepted()
    assert accepted(control=None), "a control that became NaN is seen"
    assert not accepted(clamped=1)
    for wrong in ({"lean": 2.02}, {"balanced": 2.02}, {"lean": None}, {"control": 2.1}, {"float32_states": None}):
        assert not accepted(**wrong), wrong  # type: ignore[arg-type]


def test_a_schedule_must_end_nearer_than_its_null_model_differs() -> None:
    plan = scheduled.plan(first=3, seeds=2)
    losses = {"bf16": (2.0, 2.1), scheduled.ALONE: (2.02, 2.12), scheduled.SCHEDULE: (2.01, 2.111)}
    quiet = {NULL: (2.0, 2.1), scheduled.LATE: (2.0201, 2.1199)}
    done = acceptance_of(plan, {**losses, **quiet})
    assert done.accepted and "nearer bf16 than `nvfp4` by +0.0095 ± 0.0005" in done.verdict(done)[1]  # type: ignore[misc]
    assert "minus nvfp4 alone ± std. error" in done.table()[0]
    assert not acceptance_of(plan, {**losses, **quiet, scheduled.LATE: (2.03, 2.12)}).accepted
    runs = {(run.row, run.seed): run for run in plan.runs()}
    assert runs[scheduled.SCHEDULE, 3].after == runs[scheduled.ALONE, 3].folder and runs[scheduled.ALONE, 3].keep == 255
    for wrong in ({"seeds": 1}, {"steps": 1}):
        with pytest.raises(ValueError, match="give"):
            scheduled.plan(**wrong)


def test_a_run_is_trained_from_nudged_codes(tmp_path: Path) -> None:
    """Two steps of the smallest model; the null model begins elsewhere, a little."""
    plan = optimizers.plan(steps=2, seeds=1, model="nano", batch=1, sequence=16, folder=tmp_path)
    before = dict(PRESETS)
    try:
        outcomes = {run.row: training.train(run) for run in plan.runs() if run.row in (FLOAT32_STATES, NULL, "lean")}
    finally:
        PRESETS.clear()
        PRESETS.update(before)
    base, null, lean = (outcomes[row].loss for row in (FLOAT32_STATES, NULL, "lean"))
    assert base is not None and null is not None and lean is not None
    assert null != base and abs(null - base) < 1e-2 and abs(lean - base) < 1e-2
    assert outcomes["lean"].updates > 0
