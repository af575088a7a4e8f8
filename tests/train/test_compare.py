import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quaver.comparison import Comparison
from quaver.comparison.report import save
from quaver.train import checkpoint, data, files
from quaver.train.compare import SeedRun, compare_runs
from quaver.train.config import to_toml
from quaver.train.loop import run_training
from quaver.train.metrics import read
from quaver.train.progress import time_left
from tests import forked
from tests.train.conftest import MakeConfig


def made_up(recipe: str, seed: int, offset: float, make_config: MakeConfig, failure: str | None = None) -> SeedRun:
    records = []
    for step in range(1, 11):
        loss = 5 - step / 4 + offset + seed / 10
        records.append({"step": step, "loss": loss, "tokens_per_second": 100.0 + step, "seconds": step})
    records.append({"step": 10, "validation_loss": 2.0 + offset + seed / 10, "seconds": 10})
    return SeedRun(config=make_config(recipe=recipe, seed=seed), records=tuple(records), failure=failure)


def made_up_comparison(*runs: SeedRun) -> Comparison:
    return Comparison(runs=tuple(run.result for run in runs), emulated=True)


def test_the_pair_takes_the_seeds_spread_away(make_config: MakeConfig) -> None:
    runs = [made_up("bf16", seed, 0, make_config) for seed in (0, 1, 2)]
    runs += [made_up("mxfp8", seed, 0.01 * (seed + 1), make_config) for seed in (0, 1, 2)]
    row = made_up_comparison(*runs).row("mxfp8")
    assert row["difference"] == pytest.approx(0.02) and row["loss"] == pytest.approx(2.12) and row["n"] == 3
    assert row["high"] - 0.02 == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert row["tokens_per_second"] == 105.5 and row["verdict"] == "undecided: more seeds"


def test_a_report_of_two_seeds_has_a_wide_interval_and_explains_speeds(make_config: MakeConfig, tmp_path: Path) -> None:
    runs = [made_up("bf16", seed, 0, make_config) for seed in (0, 1)]
    runs += [made_up("mxfp8", seed, 0.001 * (seed + 1), make_config) for seed in (0, 1)]
    report, picture = save(made_up_comparison(*runs), tmp_path)
    assert "| +0.0015 | -0.0049 to +0.0079 |" in report.read_text() and "two seeds say little" in report.read_text()
    assert "were emulated" in report.read_text() and picture.read_bytes().startswith(b"\x89PNG")


def test_the_time_left_follows_the_steps_so_far() -> None:
    assert time_left(60, 100, 400) == "about 3 min left"
    assert time_left(10, 100, 400) == "about 30 s left"
    assert time_left(10, 0, 400) == time_left(10, 400, 400) == ""


def test_a_failed_run_is_named_and_the_others_are_reported(make_config: MakeConfig, tmp_path: Path) -> None:
    comparison = made_up_comparison(
        made_up("bf16", 0, 0, make_config),
        made_up("mxfp8", 0, 0.1, make_config),
        made_up("nvfp4", 0, 0, make_config, failure="it ran away"),
    )
    text = save(comparison, tmp_path)[0].read_text()
    assert "| mxfp8 | 1 | 2.1000 | +0.1000 |  | 106 | one seed: no verdict |" in text
    assert "| nvfp4 | 0 |  |  |  |  | failed |" in text and "nvfp4 seed 0 failed: it ran away" in text
    assert "no interval" in text and "compare.png" in text


@pytest.mark.usefixtures("forked_runs")
def test_compare_trains_recipes_by_seeds_each_in_its_process(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("compared", tokens="bpe", vocab=300)
    comparison = compare_runs(config, ["bf16", "mxfp8"], seeds=2, jobs=2)
    assert not comparison.failures and comparison.recipes == ["bf16", "null", "mxfp8"] and len(comparison.runs) == 6
    row, null = comparison.row("mxfp8"), comparison.row("null")
    assert 0 < abs(row["difference"]) < 0.1 and row["low"] < row["high"]
    assert 0 < abs(null["difference"]) < abs(row["difference"])
    alone = run_training(make_config("alone", tokens="bpe", vocab=300, recipe="mxfp8", seed=1))
    assert comparison.finished("mxfp8")[1].losses == alone.losses

    again = compare_runs(config, ["bf16", "mxfp8"], seeds=2, resume=True)
    assert again.runs == comparison.runs
    with pytest.raises(ValueError, match="already holds a run"):
        compare_runs(config, ["bf16", "mxfp8"], seeds=2)
    with pytest.raises(ValueError, match="has steps = 10, and now it is 20; resume with the same options"):
        compare_runs(replace(config, steps=20), ["bf16", "mxfp8"], resume=True)


@pytest.mark.usefixtures("forked_runs")
def test_every_run_reads_the_text_that_was_read_first(make_config: MakeConfig, tmp_path: Path, text: Path) -> None:
    """The folder of the comparison is inside the text, as with `--text .`, and the text changes between two runs."""
    config = make_config(str(text / "runs" / "compared"), steps=1, validate_every=0)
    folder = Path(config.out)
    compare_runs(config, ["bf16"])
    (text / "00.txt").write_text("something else")
    comparison = compare_runs(config, ["tensorwise"], resume=True)
    assert not comparison.failures and len(comparison.runs) == 3
    states = [json.loads(path.read_text()) for path in folder.glob("*/step-000001/state.json")]
    (fingerprint,) = {state["text"] for state in states}
    assert len(states) == 3 and fingerprint in comparison.notes[0]

    with pytest.raises(ValueError, match="already holds a run; continue it with --resume"):
        compare_runs(config, ["bf16"])
    with pytest.raises(ValueError, match=r"was read with text = .*, and now it is .*; resume with the same options"):
        compare_runs(replace(config, text=(str(text / "01.txt"),)), ["bf16"], resume=True)
    (folder / "text.safetensors").unlink()
    with pytest.raises(ValueError, match=r"bf16-seed0 cannot go on: .* was trained on a text of fingerprint \w+, and"):
        compare_runs(config, ["bf16"], resume=True)


@pytest.mark.parametrize("name", ["compare.png", "report.md", "mxfp8-seed0/loss.png", "mxfp8-seed0/log.txt"])
def test_a_folder_in_the_place_of_a_file_is_seen_before_any_run(make_config: MakeConfig, name: str) -> None:
    config = make_config("compared")
    (Path(config.out) / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"{name} is a folder, not a file; move it away"):
        compare_runs(config, ["mxfp8"])
    assert not list(Path(config.out).glob("bf16*"))
    shutil.rmtree(Path(config.out) / name)
    (Path(config.out) / "nvfp4-seed0").touch()
    with pytest.raises(ValueError, match="nvfp4-seed0 is a file, not a folder; move it away"):
        compare_runs(config, ["nvfp4"])
    assert not list(Path(config.out).glob("bf16*"))


def test_files_written_by_runs_are_not_training_text(make_config: MakeConfig, text: Path) -> None:
    before = data.load(make_config())
    first = make_config(str(text / "runs" / "first"), steps=1)
    run_training(first)
    after = data.load(make_config(), out=text / "runs" / "second")
    assert after.fingerprint == before.fingerprint
    with pytest.raises(ValueError, match="is the folder that this run writes into; give another --out"):
        data.load(make_config(), out=text)


def test_a_frozen_text_that_was_changed_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    read = data.load(make_config())
    path = tmp_path / "text.safetensors"
    data.write(path, data.SavedTokens(read.train, read.validation, "", {"text": ["a"]}))
    again = data.load(make_config(text=(str(path),)))
    assert again.fingerprint == read.fingerprint and np.array_equal(again.train, read.train)
    with pytest.raises(ValueError, match="was made by other tokens than --tokens"):
        data.load(make_config(text=(str(path),), tokens="bpe"), saved_tokenizer(tmp_path, make_config))
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(whole), 40):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"is not (as it was written|a text that quaver compare wrote)"):
            data.read(path)


def saved_tokenizer(folder: Path, make_config: MakeConfig) -> Path:
    learnt = data.load(make_config(tokens="bpe", vocab=300)).tokenizer
    assert learnt is not None
    learnt.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.usefixtures("forked_runs")
def test_no_run_continues_after_the_comparison_ends(make_config: MakeConfig) -> None:
    """For any cause, such as a disk that fills while a report is written."""
    config = make_config(steps=5000, checkpoint_every=0, validate_every=0)
    metrics = Path(config.out) / "bf16-seed0" / "metrics.jsonl"

    def fail(runs: object) -> None:
        if read(metrics):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        compare_runs(config, ["bf16"], watch=fail)
    done = read(metrics)[-1]["step"]
    assert checkpoint.latest(metrics.parent) == metrics.parent / f"step-{done:06d}"
    with files.locked(metrics.parent, "training"):
        pass


def test_a_misspelt_recipe_starts_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mxfp8"):
        compare_runs(make_config("none"), ["mxpf8"])
    for options, message in (({"seeds": 0}, "at least"), ({"jobs": -1}, "at least"), ({"margin": 0.0}, "margin is 0")):
        with pytest.raises(ValueError, match=message):
            compare_runs(make_config("none"), ["mxfp8"], **options)
    assert not (tmp_path / "none").exists()


def test_ctrl_c_saves_every_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("stopped", steps=5000, checkpoint_every=0, validate_every=0)
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "quaver.train",
        "compare",
        "--config",
        str(tmp_path / "c.toml"),
        "--quiet",
    ]
    command += ["--recipes", "bf16,mxfp8", "--jobs", "2"]
    process = forked.quick.Popen(command, stderr=forked.quick.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folders = [tmp_path / "stopped" / f"{name}-seed0" for name in ("bf16", "mxfp8")]
    while not all(read(folder / "metrics.jsonl") for folder in folders):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"continue with --resume" in errors and b"Traceback" not in errors
    assert all(checkpoint.latest(folder) for folder in folders)
