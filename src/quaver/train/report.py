"""Text output of runs: the table of a comparison, report.md, recipe colours, and progress lines."""

import platform
from collections.abc import Callable, Sequence
from colorsys import hsv_to_rgb
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

from rich import box
from rich.table import Table

from quaver import recipes
from quaver.train import config as recipe_name
from quaver.train import files, frameworks
from quaver.train.compare import BASELINE, Comparison, RecipeRow
from quaver.train.metrics import Record

# ---- comparison table ----

TITLE = "Final validation loss, nats a token"
COLUMNS = ("recipe", "loss", f"minus {BASELINE}, 95 % interval", "relative", "tokens/s")


def row_cells(row: RecipeRow, baseline: float | None) -> tuple[str, ...]:
    """Format one row as text, in the order of COLUMNS."""
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
    return [row_cells(row, baseline) for row in rows]


def rich_table(comparison: Comparison) -> Table:
    shown = Table(title=TITLE, title_justify="left", box=box.SIMPLE)
    shown.add_column(COLUMNS[0], overflow="fold")
    for name in COLUMNS[1:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in table(comparison):
        shown.add_row(*row)
    return shown


def notes(comparison: Comparison) -> list[str]:
    """Return the sentences that explain the table."""
    config = comparison.runs[0].config
    seeds = len({run.config.seed for run in comparison.runs})
    tokens = config.batch * config.accumulate * config.sequence
    which = f"seed {config.seed}" if seeds == 1 else f"seeds {config.seed} to {config.seed + seeds - 1}"
    text = f" (the text's fingerprint: {comparison.text})" if comparison.text else ""
    sentences = [
        f"Model {config.model}, {config.steps} steps of {tokens} tokens, {which}; "
        f"the same initial weights and batches under every recipe{text}."
    ]
    if seeds == 1:
        sentences.append("With one seed no interval can be given; --seeds 3 shows what is chance.")
    else:
        sentences.append(
            "A difference is paired by seed: its mean over seeds, and the 95 % confidence interval of that mean "
            f"(Student's t over {seeds} seeds" + ("; two seeds say little)." if seeds == 2 else ").")
        )
    if frameworks.runs_on_cpu(config):
        sentences.append("Tokens/s of recipes are of exact emulation on a CPU, and say nothing of a GPU's speed.")
    if comparison.jobs > 1:
        sentences.append(f"Speeds are of {comparison.jobs} runs side by side; --jobs 1 times each alone.")
    return sentences


def failures(comparison: Comparison) -> list[str]:
    return [f"{run.label} failed: {run.failure} (its log: {run.config.out}/log.txt)" for run in comparison.failures]


def write_report(comparison: Comparison, pictures: Sequence[Path]) -> Path:
    """Write report.md into the comparison's folder: table, notes, failures, pictures and the machine."""
    lines = ["# Recipes compared", "", f"{TITLE}:", "", *markdown_table(table(comparison)), ""]
    lines += [f"{note}\n" for note in notes(comparison)]
    lines += [f"**{failure}**\n" for failure in failures(comparison)]
    lines += [f"![{path.stem}]({path.name})\n" for path in pictures]
    framework = comparison.runs[0].config.framework
    lines += [f"{framework} {version(framework)}, Python {platform.python_version()}, {platform.machine()}."]
    path = comparison.folder / "report.md"
    files.write(path, "\n".join(lines) + "\n")
    return path


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    shown = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows]
    return ["| " + " | ".join(row) + " |" for row in shown]


# ---- colours ----
# Colours of recipes in all pictures, independent of which other recipes are shown.
#
# Source: Okabe and Ito's colour-blind safe palette (without their yellow, which is too pale for a line).

GREY = "#444444"

COLOURS = {
    "bf16": GREY,
    "delayed": "#0072B2",
    "tensorwise": "#E69F00",
    "rowwise": "#CC79A7",
    "rowwise_bf16_wgrad": "#7A5195",
    "blockwise": "#56B4E9",
    "mxfp8": "#009E73",
    "mxfp6": "#8C6D1F",
    "mxfp4": "#7F0000",
    "nvfp4": "#D55E00",
}


def recipe_colour(text: str) -> str:
    """Return a recipe's colour from the table; with options, or if not in the table, a colour hashed from its specs.

    Args:
        text: as `TrainConfig.recipe` accepts it; two texts of the same recipe or schedule have the same colour.
    Raises:
        ValueError: no recipe has this name.
    """
    parts = [(part.recipe, part.end) for part in recipe_name.parse_phases(text)]
    recipe = parts[0][0]
    if len(parts) > 1:
        drawn = crc32(repr(parts).encode())
    elif recipe.name in COLOURS and recipe == recipes.get(recipe.name):
        return COLOURS[recipe.name]
    else:
        drawn = crc32(repr(recipe).encode())
    red_green_blue = hsv_to_rgb((drawn & 0xFFFF) / 0x10000, 0.85, 0.45 + 0.35 * (drawn >> 16) / 0x10000)
    return "#" + "".join(f"{round(255 * part):02X}" for part in red_green_blue)


# ---- progress ----
# Progress without a terminal: a line every few steps, for a log that is read during the run.

#: Approximate number of lines per run.
PROGRESS_LINES = 20


def format_step(record: Record, parts: Sequence[str] = ()) -> str:
    """Format a step's loss and speed, and the current recipe if the run changes its recipe.

    Args:
        record: record of a training step.
        parts: recipes of a run that changes its recipe.
    """
    text = f"loss {record['loss']:.3f}  {record['tokens_per_second']:>8,.0f} tokens/s"
    if 0 < record.get("part", 0) <= len(parts):
        text += f"  {parts[record['part'] - 1]}"
    return text


def time_left(seconds: float, done: int, total: int) -> str:
    """Return the estimated remaining time as text; "" before the first step and after the last.

    Args:
        seconds: time that the completed steps took.
        done: completed steps.
        total: all steps.
    """
    if not done or done >= total:
        return ""
    left = seconds * (total - done) / done
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {max(left, 1):.0f} s left"


class ProgressLines:
    """Print lines for a run's first and last step, for about PARTS steps in between, and when the recipe changes.

    Args:
        label: name of the run before each line; "" for none.
        steps: number of steps of the run.
        say: prints a line.
        parts: recipes of a run that changes its recipe.
        left: returns the remaining time of all runs as text.
    """

    def __init__(
        self,
        label: str,
        steps: int,
        say: Callable[[str], None],
        parts: Sequence[str] = (),
        left: Callable[[], str] = lambda: "",
    ) -> None:
        self.label = label
        self.steps = steps
        self.say = say
        self.parts = parts
        self.left = left
        self.part: int | None = None
        self.every = max(1, steps // PROGRESS_LINES)
        self.shown = 0
        self.due = 1

    def __call__(self, record: Record) -> None:
        """Print the record of a training step if it is due; records seen before are ignored."""
        step, part = record["step"], record.get("part")
        changed = self.part is not None and part != self.part
        if step <= self.shown or (step < self.due and step != self.steps and not changed):
            return
        self.shown, self.due, self.part = step, (step // self.every + 1) * self.every, part
        label, left = f"{self.label}: " if self.label else "", self.left()
        shown = f"{label}step {step} of {self.steps}  {format_step(record, self.parts)}"
        self.say(f"{shown}  {left}" if left else shown)
