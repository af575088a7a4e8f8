"""Losses of runs in files: one JSON object per line with the step and the loss, as trackers and scripts write them."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quaver.comparison.report import check_plotting, save
from quaver.comparison.results import ComparedRun, Comparison, check_margin, last_tenth
from quaver.recipes.text import shown

#: Losses above this, the largest float32, are those of a run that has diverged.
LARGEST = 3.4e38


def read_losses(path: Path) -> dict[int, float]:
    """Return the losses of a file by step.

    Every line is a JSON object; other keys than "step" and "loss", lines without a loss or with null, and an unfinished
    last line are ignored. A later line replaces an earlier one of the same step, as in a resumed run.

    Raises: ValueError with the line number, for a line of another form, or if there is no loss; OSError.
    """
    losses: dict[int, float] = {}
    lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = json.loads(line) if line.strip() else {}
            loss, step = record.get("loss"), record.get("step")
            if loss is not None:
                losses[operator.index(step)] = float(loss)  # type: ignore[arg-type]
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break  # a line that is still being written
            raise ValueError(
                f'line {number} of {path} is {shown(line)}; write one JSON object per line, such as {{"step": 1, '
                '"loss": 2.5}'
            ) from error
    if not losses:
        raise ValueError(f'{path} has no line with a loss; write one per step, such as {{"step": 1, "loss": 2.5}}')
    return dict(sorted(losses.items()))


def finished_run(recipe: str, seed: int, losses: Mapping[int, float], diverged: int | None = None) -> ComparedRun:
    """Return a run with the mean of its last losses, or its failure if it diverged at a step."""
    if diverged is not None:
        return ComparedRun(recipe=recipe, seed=seed, losses=dict(losses), failure=f"diverged at step {diverged}")
    return ComparedRun(recipe=recipe, seed=seed, losses=dict(losses), final=last_tenth(list(losses.values())))


def compare_files(
    files: Mapping[str, str | Path | Sequence[str | Path]], *, margin: float = 0.01, out: str | Path | None = None
) -> Comparison:
    """Compare runs by their files of losses; the first name is the one that the others are compared with.

        compare_files({"bf16": ["a0.jsonl", "a1.jsonl"], "mine": ["b0.jsonl", "b1.jsonl"]})

    Args:
        files: per name a file, or a file per seed. Files at the same place in two lists are a pair. Each line of a file
            is a JSON object such as {"step": 1, "loss": 2.5}.
        margin: largest difference in nats that counts as none.
        out: folder for compare.png and report.md, made if missing; None writes no files.

    Raises:
        ValueError: fewer than two names, another number of files or other steps than the first has, or a bad file.
    """
    check_margin(margin)
    if out is not None:
        check_plotting()
    paths = {name: [Path(p) for p in ([p] if isinstance(p, str | Path) else p)] for name, p in files.items()}
    counts = {name: len(each) for name, each in paths.items()}
    if len(paths) < 2 or len(set(counts.values())) > 1 or 0 in counts.values():
        raise ValueError(f"files per name: {counts}; give at least two names, and each as many files (one per seed)")
    runs: list[ComparedRun] = []
    for name, each in paths.items():
        for seed, path in enumerate(each):
            losses = read_losses(path)
            diverged = next((step for step, loss in losses.items() if not abs(loss) < LARGEST), None)
            runs.append(finished_run(name, seed, losses, diverged))
    check_steps(runs)
    comparison = Comparison(runs=tuple(runs), margin=margin, baseline=next(iter(paths)))
    if out is not None:
        save(comparison, Path(out))
    return comparison


def check_steps(runs: Iterable[ComparedRun]) -> None:
    """Raise a ValueError unless all finished runs have the same steps."""
    finished = [run for run in runs if run.final is not None]
    for run in finished:
        if list(run.losses) != list(finished[0].losses):
            ends = [f"{r.label} has {len(r.losses)} steps up to {max(r.losses)}" for r in (finished[0], run)]
            raise ValueError(f"{' and '.join(ends)}; only runs of the same steps can be compared")
