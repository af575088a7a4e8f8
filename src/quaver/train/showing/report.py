"""A comparison as a table: on the terminal and in report.md."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.table import Table

from quaver.train.files import whole_file
from quaver.train.learning import frameworks
from quaver.train.records.comparison import BASELINE, Comparison, Row

TITLE = "Final validation loss, nats a token"
COLUMNS = ("recipe", "loss", f"minus {BASELINE}, 95 % interval", "relative", "tokens/s")


def cells(row: Row, baseline: float | None) -> tuple[str, ...]:
    """One row, as text in the order of COLUMNS."""
    speed, loss = f"{row.speed:,.0f}", f"{row.loss:.4f}"
    if row.recipe == BASELINE:
        return (row.recipe, loss, "", "", speed)
    if row.difference is None or baseline is None:
        return (row.recipe, loss, f"no {BASELINE}", "", speed)
    interval = "one seed" if row.interval is None else f"± {row.interval:.4f}"
    return (
        row.recipe,
        loss,
        f"{row.difference:+.4f} {interval}",
        f"{100 * row.difference / baseline:+.2f} %",
        speed,
    )


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    rows = comparison.rows()
    baseline = next((row.loss for row in rows if row.recipe == BASELINE), None)
    return [cells(row, baseline) for row in rows]


def rich_table(comparison: Comparison) -> Table:
    shown = Table(title=TITLE, title_justify="left", box=box.SIMPLE)
    shown.add_column(COLUMNS[0], overflow="fold")
    for name in COLUMNS[1:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table(comparison):
        shown.add_row(*row)
    return shown


def notes(comparison: Comparison) -> list[str]:
    """Notes that explain the table."""
    config = comparison.runs[0].config
    seeds = len({run.config.seed for run in comparison.runs})
    tokens = config.batch * config.accumulate * config.sequence
    which = f"seed {config.seed}" if seeds == 1 else f"seeds {config.seed} to {config.seed + seeds - 1}"
    text = f" (the text's fingerprint: {comparison.text})" if comparison.text else ""
    said = [
        f"Model {config.model}, {config.steps} steps of {tokens} tokens, {which}; "
        f"the same initial weights and batches under every recipe{text}."
    ]
    if seeds == 1:
        said.append("With one seed no interval can be given; --seeds 3 shows what is chance.")
    else:
        said.append(
            "A difference is paired by seed: its mean over seeds, and the 95 % confidence interval of that mean "
            f"(Student's t over {seeds} seeds" + ("; two seeds say little)." if seeds == 2 else ").")
        )
    if frameworks.on_cpu(config):
        said.append("Tokens/s of recipes are of exact emulation on a CPU, and say nothing of a GPU's speed.")
    if comparison.jobs > 1:
        said.append(f"Speeds are of {comparison.jobs} runs side by side; --jobs 1 times each alone.")
    return said


def failures(comparison: Comparison) -> list[str]:
    return [f"{run.label} failed: {run.failure} (its log: {run.config.out}/log.txt)" for run in comparison.failures]


def write_report(comparison: Comparison, pictures: Sequence[Path]) -> Path:
    """report.md in the comparison's folder: table, notes, failures, pictures and the machine."""
    lines = ["# Recipes compared", "", f"{TITLE}:", "", *markdown_table(table(comparison)), ""]
    lines += [f"{note}\n" for note in notes(comparison)]
    lines += [f"**{failure}**\n" for failure in failures(comparison)]
    lines += [f"![{path.stem}]({path.name})\n" for path in pictures]
    framework = comparison.runs[0].config.framework
    lines += [f"{framework} {version(framework)}, Python {platform.python_version()}, {platform.machine()}."]
    path = comparison.folder / "report.md"
    whole_file.write(path, "\n".join(lines) + "\n")
    return path


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    shown = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows]
    return ["| " + " | ".join(row) + " |" for row in shown]
