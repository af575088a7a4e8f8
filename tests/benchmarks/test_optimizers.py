"""The tables of docs/optimizer.md and docs/design/optimizer.md."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.acceptance import optimizer_bytes, optimizers
from benchmarks.acceptance.optimizers import BASELINE, CONTROL, KINDS, NULL, Outcome, Plan
from quaver.reference.optimizer_state import PRESETS


def test_live_bytes_count_only_live_tensors() -> None:
    kept = torch.ones(1000)
    with optimizer_bytes.live() as seen:
        first = kept + 1
        assert seen.now == 4000
        first.add_(1)
        view = first[10:]
        assert seen.now == 4000
        second = view * 2
        assert seen.now == seen.peak == 4000 + 990 * 4
        del first, view, second
        assert seen.now == 0 and seen.peak == 7960


@pytest.mark.parametrize("preset", ["lean", *(pytest.param(n, marks=pytest.mark.slow) for n in ("balanced", "exact"))])
def test_a_step_needs_memory_of_one_chunk_for_any_matrix_size(preset: str) -> None:
    few, many = (optimizer_bytes.above(preset, "tensorwise", (rows, 1024)) for rows in (512, 1024))
    assert few > 0 and many <= few * 1.01


def test_both_pages_have_their_marks() -> None:
    page = optimizers.PAGE.read_text(encoding="utf-8")
    for mark in (optimizers.BEGIN, optimizers.END, optimizer_bytes.BEGIN, optimizer_bytes.END):
        assert page.count(mark) == 1
    assert optimizers.written(optimizers.written(page, ["x"]), ["x"]) == optimizers.written(page, ["x"])
    with pytest.raises(ValueError, match="lacks the line"):
        optimizers.written("", ["x"])


def test_the_summary_table_matches_each_entry_of_the_page() -> None:
    page = optimizers.PAGE.read_text(encoding="utf-8")
    lines = optimizers.together(page)
    assert "\n".join(lines) in optimizers.SUMMARY.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in lines[2:]}
    assert rows.keys() == PRESETS.keys()
    assert " 5.078 " in rows["lean"] and "±" in rows["lean"] and "±" in rows["balanced"]
    # A preset that holds its updates has the error of held ones, another its own.
    assert rows["lean"].count("clamped") == 1 and "clamped" not in rows["msamp"]


@pytest.mark.slow
def test_steps_in_backward_keep_gradients_from_waiting_together() -> None:
    last, first = (optimizer_bytes.above_in_backward("balanced", threshold, 256, 8) for threshold in (None, 1))
    # Of eight gradients in bfloat16 seven wait no more.
    assert last - first >= 5 * 256 * 256 * 2


def test_tables_use_seeds_finished_by_all_variants_and_check_every_rule(tmp_path: Path) -> None:
    def holds(seeds: int = 2, **losses: float | None) -> bool:
        plan = Plan(seeds=3, folder=tmp_path)
        for kind in KINDS:
            for seed in range(seeds):
                loss = {
                    BASELINE: 2.0,
                    NULL: 2.001,
                    "balanced": 2.002,
                    "lean": 1.999,
                    CONTROL: 2.5,
                    "adamw": 2.0,
                    **losses,
                }[kind]
                path = plan.result(kind, seed)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(asdict(Outcome(loss=loss, updates=10))))
        lines, held = optimizers.table(plan)
        assert f"**{seeds} seeds** of 3" in lines[0]
        return held

    assert holds()
    assert holds(control=None), "a control that became NaN is seen"
    for wrong in ({"lean": 2.02}, {"balanced": 2.02}, {"lean": None}, {"control": 2.1}, {"float32_states": None}):
        assert not holds(**wrong), wrong


def test_a_run_is_trained_from_nudged_codes(tmp_path: Path) -> None:
    """All kinds, two steps of the smallest model; the null model begins elsewhere, a little."""
    plan = Plan(steps=2, seeds=1, model="nano", batch=1, sequence=16, folder=tmp_path)
    rows = dict(PRESETS)
    try:
        PRESETS.update(optimizers.presets())
        tokens = optimizers.load(plan.config(BASELINE, 0))
        losses = {kind: optimizers.trained(plan.config(kind, 0), tokens) for kind in (BASELINE, NULL, "lean")}
    finally:
        PRESETS.clear()
        PRESETS.update(rows)
    base, null, lean = (losses[kind].loss for kind in (BASELINE, NULL, "lean"))
    assert base is not None and null is not None and lean is not None
    assert null != base and abs(null - base) < 1e-2 and abs(lean - base) < 1e-2
    assert losses["lean"].updates > 0
