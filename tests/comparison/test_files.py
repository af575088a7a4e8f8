"""Comparison of runs by their files of losses."""

import json
from pathlib import Path

import pytest

from quaver.comparison import compare_files
from quaver.comparison import report as reporting


def written(path: Path, losses: list[float]) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses)))
    return path


def test_two_runs_have_a_difference_and_no_verdict(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs.jsonl", [3.0] * 18 + [2.0, 1.0])
    mine = tmp_path / "mine.jsonl"
    lines = [json.dumps({"step": step, "loss": 9.0, "lr": 0.1}) for step in (19, *range(20))]
    lines += ['{"step": 19, "validation_loss": 7.0}', "", '{"step": 18, "loss": 2.5}', '{"step": 19, "loss": 1.7}']
    mine.write_text("\n".join(lines) + '\n{"step": 20, "lo')
    comparison = compare_files({"theirs": theirs, "mine": str(mine)}, out=tmp_path / "out")
    row = comparison.row("mine")
    assert (row["loss"], row["difference"]) == pytest.approx((2.1, 0.6)) and row["low"] is None
    assert row["verdict"] == "one seed: no verdict" and comparison.baseline == "theirs"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| minus theirs |" in report and "![compare.png](compare.png)" in report
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_several_seeds_are_paired_in_their_order(tmp_path: Path) -> None:
    first = [written(tmp_path / f"a{seed}.jsonl", [2.0 + seed] * 5) for seed in range(3)]
    second = [written(tmp_path / f"b{seed}.jsonl", [2.001 + seed] * 5) for seed in range(3)]
    comparison = compare_files({"a": first, "b": second}, margin=0.002)
    assert comparison.row("b")["verdict"] == "equivalent to a within ±0.002 nats (n = 3)"
    assert comparison.losses["b"][2] == [2.001 + 2] * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}{seed}.jsonl" for name in "ab" for seed in range(3)
    ]


def test_a_file_may_end_in_the_middle_of_a_character_or_without_a_line_end(tmp_path: Path) -> None:
    whole, torn, open_ended = (tmp_path / name for name in ("whole", "torn", "open"))
    lines = b'{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}'
    whole.write_bytes(b"\xef\xbb\xbf" + lines + b"\n")
    torn.write_bytes(lines + b'\n{"step": 2, "note": "\xe2\x82')
    open_ended.write_bytes(lines)
    comparison = compare_files({"whole": whole, "torn": torn, "open": open_ended})
    assert comparison.losses["whole"] == comparison.losses["torn"] == comparison.losses["open"] == {0: [2.0, 1.0]}


def test_a_run_with_a_loss_that_is_not_finite_has_diverged(tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [2.0, 1.9, 1.8])
    bad = written(tmp_path / "bad.jsonl", [2.0, float("nan")])
    row = compare_files({"good": good, "bad": bad}).row("bad")
    assert row["verdict"] == "diverged at step 1" and row["difference"] is None and row["n"] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no line with a loss"),
        ('{"step": 1, "lr": 2}\n', "has no line with a loss"),
        ('{"step": 1, "loss": 2}\nloss 3\n', "line 2 of .* is 'loss 3'; write one JSON object per line"),
        ("[1, 2]\n[3]\n", "line 1 of .* write one JSON object"),
        ('{"step": 1.5, "loss": 2}\n', "line 1 of .* write one JSON object"),
        ('{"step": Infinity, "loss": 2}\n', "line 1 of .* write one JSON object"),
        (f'{{"step": 1, "loss": {10**400}}}\n', "line 1 of .* write one JSON object"),
        ('{"step": 1, "loss": null}\n', "has no line with a loss"),
        ('{"loss": 2}\n', "line 1 of .* write one JSON object"),
        ('{"step": 1, "loss": "low"}\n', "line 1 of .* write one JSON object"),
        ('{"step": 0, "loss": 2}\n{"step": 2, "loss": 2}\n', "only runs of the same steps can be compared"),
    ],
)
def test_a_bad_file_gives_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    good, bad = written(tmp_path / "good.jsonl", [2.0, 1.0]), tmp_path / "bad.jsonl"
    bad.write_text(content)
    with pytest.raises(ValueError, match=message):
        compare_files({"good": good, "bad": bad}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_arguments_give_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "a.jsonl", [2.0])
    with pytest.raises(ValueError, match=r"files per name: \{'a': 1\}; give at least two names"):
        compare_files({"a": file})
    with pytest.raises(ValueError, match=r"files per name: \{'a': 1, 'b': 2\}; .* as many files"):
        compare_files({"a": file, "b": [file, file]})
    with pytest.raises(ValueError, match="margin is -1"):
        compare_files({"a": file, "b": file}, margin=-1)
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib, or leave out `out`"):
        compare_files({"a": file, "b": file}, out=tmp_path / "out")
    assert compare_files({"a": file, "b": file}).row("b")["difference"] == 0
