from pathlib import Path

from quaver.train.metrics import Metrics, newest, read


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, 0) as metrics:
        metrics.append({"step": 1, "loss": 0.1 + 0.2, "seconds": 1.5})
    assert read(path) == [{"step": 1, "loss": 0.30000000000000004, "seconds": 1.5}]


def test_metrics_beyond_the_resumed_step_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0, "seconds": {step}.0}}\n' for step in range(1, 6)) + '{"st')
    with Metrics(path, 3) as metrics:
        assert metrics.seconds == 3.0
        metrics.append({"step": 4, "loss": 2.0, "seconds": 4.5})
    assert [(record["step"], record["loss"]) for record in read(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
    ]


def test_the_newest_records_are_the_last_of_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in (1, 5, 500):
        with Metrics(path, 0) as metrics:
            for step in range(1, steps + 1):
                metrics.append({"step": step, "loss": 1.0 / step, "seconds": 0.5})
        records = newest(path)
        assert records == read(path)[-len(records) :] and records[-1]["step"] == steps


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == newest(tmp_path / "none") == []
