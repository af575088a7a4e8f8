"""`inspect_every`: measured steps of a run, in inspect.jsonl and in the metrics; after a resume too."""

import json
from pathlib import Path
from typing import Any

import pytest

from quaver.train.learner import NonFiniteError
from quaver.train.loop import run_training
from quaver.train.metrics import read
from tests.train.conftest import MakeConfig
from tests.train.test_trackers import killed, needs, recorded, scalars

FIGURES = {f"inspect_{name}" for name in ("snr", "error", "flushed", "saturated", "flagged")}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "inspect.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_measured_steps_are_recorded_and_change_no_loss(make_config: MakeConfig, recompute: str) -> None:
    options: dict[str, Any] = {"recipe": "delayed(history=4, attention=True)", "recompute": recompute, "accumulate": 2}
    plain = run_training(make_config("plain", **options))
    # Step 6 follows a validation, which is not measured.
    run = run_training(make_config("measured", inspect_every=3, **options))
    assert run.losses == plain.losses and run.validation_losses == plain.validation_losses
    rows = rows_of(run.folder)
    assert {row["step"] for row in rows} == {3, 6, 9}
    elements = {row["step"]: row["elements"] for row in rows if row["tensor"] == "output"}
    assert len(set(elements.values())) == 1
    for record in read(run.folder / "metrics.jsonl"):
        measured = "loss" in record and record["step"] % 3 == 0
        assert record.keys() & FIGURES == (FIGURES if measured else set())
        if measured:
            own = [row for row in rows if row["step"] == record["step"]]
            assert record["inspect_snr"] == min(row["snr"] for row in own if row["snr"] is not None)
            assert record["inspect_flushed"] == max(row.get("flushed", 0) for row in own)
            assert record["inspect_flagged"] == sum(bool(row["flags"]) for row in own)


@pytest.mark.slow
def test_jax_measures_steps_and_changes_no_loss(make_config: MakeConfig) -> None:
    options: dict[str, Any] = {"recipe": "tensorwise", "framework": "jax", "accumulate": 2}
    plain = run_training(make_config("plain", **options))
    # Step 6 follows a validation, which is not measured.
    run = run_training(make_config("measured", inspect_every=3, **options))
    assert run.losses == plain.losses and run.validation_losses == plain.validation_losses
    rows = rows_of(run.folder)
    assert {row["step"] for row in rows} == {3, 6, 9}
    assert "layers.0.attention.q_proj" in {row["layer"] for row in rows}
    assert len({row["elements"] for row in rows if row["tensor"] == "output" and "down_proj" in row["layer"]}) == 1
    for record in read(run.folder / "metrics.jsonl"):
        assert record.keys() & FIGURES == (FIGURES if "loss" in record and record["step"] % 3 == 0 else set())


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(make_config: MakeConfig) -> None:
    options: dict[str, Any] = {"recipe": "mxfp8", "inspect_every": 2}
    whole = run_training(make_config("whole", **options))
    config = make_config("killed", **options)
    killed(config, 8)
    assert {row["step"] for row in rows_of(Path(config.out))} == {2, 4, 6, 8}
    with (Path(config.out) / "inspect.jsonl").open("a") as file:
        file.write('{"step": 8, "unfinish')
    resumed = run_training(config, resume=True)
    assert rows_of(resumed.folder) == rows_of(whole.folder)


def test_trackers_get_the_figures(make_config: MakeConfig) -> None:
    needs("tensorboard")
    run = run_training(make_config(recipe="mxfp8", inspect_every=4, report_to=("tensorboard",)))
    shown = scalars(run.folder)
    assert set(shown) >= FIGURES and shown == recorded(run.folder)
    assert [step for step, _ in shown["inspect_snr"]] == [4, 8]


def test_the_step_that_ends_a_run_is_measured(make_config: MakeConfig) -> None:
    config = make_config(recipe="tensorwise", inspect_every=1, lr=1e25, warmup=0, clip=0.0)
    with pytest.raises(NonFiniteError, match=r"stopped at step (\d+)"):
        run_training(config)
    rows = rows_of(Path(config.out))
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    assert (
        any(row["nonfinite"] for row in last)
        and rows[-1]["step"] == max(r["step"] for r in read(Path(config.out) / "metrics.jsonl")) + 1
    )


def test_what_cannot_be_measured_is_an_error_or_a_warning(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="leave out --capture or --inspect-every"):
        run_training(make_config(recipe="mxfp8", inspect_every=1, capture="step"))
    with pytest.warns(UserWarning, match="inspect_every is 5, which has no effect here: no recipe of the run"):
        folder = run_training(make_config(inspect_every=5)).folder
    assert not (folder / "inspect.jsonl").exists()
