"""Plots of losses: of one run, of several runs, and of a comparison with the differences on their own axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quaver.train import config as recipe_name
from quaver.train import files
from quaver.train.compare import BASELINE, Comparison, RecipeRow
from quaver.train.metrics import Record, losses, phase_starts, validation_losses
from quaver.train.report import GREY, recipe_colour

BLACK = "#000000"


def plot_loss(records: Sequence[Record], path: Path, title: str, recipe: str) -> Path:
    """Write loss.png: training loss per step and its moving mean in the recipe's colour, and validation losses."""
    shade = recipe_colour(recipe)
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps, values = series(losses(list(records)))
    axes.plot(steps, values, color=shade, alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(values), color=shade, linewidth=1.8, label="training, moving mean")
    validation_set = series(validation_losses(list(records)))
    axes.plot(*validation_set, "o-", color=BLACK, markersize=4, linewidth=1.2, label="validation")
    axes.annotate(
        f"{validation_set[1][-1]:.3f}",
        (validation_set[0][-1], validation_set[1][-1]),
        (6, 0),
        textcoords="offset points",
        color=BLACK,
        va="center",
        annotation_clip=False,
    )
    names = [part.text for part in recipe_name.parse_phases(recipe)]
    for step, part in phase_starts(records).items():
        mark_phase(axes, step, BLACK, names[part - 1] if part <= len(names) else "")
    finish_figure(axes, "step", "loss (nats a token)", title)
    axes.legend(frameon=False)
    return write(figure, path)


def mark_phase(axes: Axes, step: int, shade: Any, name: str = "") -> None:
    """Draw a dotted line before the first step under a run's next recipe, labelled with that recipe."""
    axes.axvline(step - 0.5, color=shade, linewidth=1.0, linestyle=":")
    axes.annotate(
        name,
        (step - 0.5, 1.0),
        (3, -4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        color=shade,
        fontsize=9,
        va="top",
    )


def plot_runs(runs: Mapping[str, Sequence[Record]], path: Path) -> Path:
    """Plot the training losses of several runs, and below them the differences from the first, step by step.

    The first run is a broad line under the others.

    Raises: ValueError if a run has no step in common with the first.
    """
    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    curves = {name: losses(list(records)) for name, records in runs.items()}
    first, *others = curves
    steps, values = series(curves[first])
    upper.plot(steps, values, color=BLACK, linewidth=5.0, alpha=0.25, label=first)
    lower.axhline(0, color=GREY, linewidth=1.2)
    for name in others:
        (line,) = upper.plot(*series(curves[name]), linewidth=1.2, label=name)
        for step in phase_starts(runs[name]):
            mark_phase(upper, step, line.get_color())
        difference = loss_difference(curves[name], curves[first])
        if not difference:
            raise ValueError(f"{name} has no step that {first} has, so there is no difference to show")
        lower.plot(*series(difference), color=line.get_color(), linewidth=1.0)
    upper.legend(frameon=False)
    finish_figure(upper, "", "loss (nats a token)", "Training loss, each step")
    finish_figure(lower, "step", "nats a token", f"Difference from {first}")
    return write(figure, path)


def plot_comparison(comparison: Comparison, path: Path) -> Path:
    """Write compare.png: above, each recipe's training loss; below, its paired difference from bf16."""
    return write(comparison_figure(comparison), path)


def comparison_figure(comparison: Comparison) -> Figure:
    figure = Figure(figsize=(10, 8.5), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.5])
    drawn = [recipe for recipe in comparison.recipes if draw_losses(upper, comparison, recipe)]
    shown = [band for recipe in drawn for band in draw_difference(lower, comparison, recipe)]
    if upper.lines:
        upper.legend(frameon=False, ncols=2)
    config, seeds = comparison.runs[0].config, len({run.config.seed for run in comparison.runs})
    mean = "" if seeds == 1 else f", mean of {seeds} seeds"
    finish_figure(upper, "", "loss (nats a token)", f"Training loss: {config.model}, {config.steps} steps{mean}")
    lower.axhline(0, color=GREY, linewidth=1.2)
    if shown:
        lower.set_ylim(*style_axes(np.concatenate([*shown, [0.0]])))
        label_finals(lower, [row for row in comparison.rows() if row.recipe != BASELINE and row.difference is not None])
    around = "" if seeds == 1 else ", shaded: standard error"
    finish_figure(lower, "step", "nats a token", f"Difference from {BASELINE}, same seed and batch", pad=22)
    key = f"thin: each step, thick: moving mean{around}; dots: the final validation"
    lower.text(0, 1.02, key, transform=lower.transAxes, fontsize=9, color=GREY)
    return figure


def draw_losses(axes: Axes, comparison: Comparison, recipe: str) -> bool:
    """Plot a recipe's training loss, averaged over seeds; bf16 is a broad line under the others."""
    runs = list(comparison.finished(recipe).values())
    if not runs:
        return False
    steps, values = stack_series([run.losses for run in runs])
    width, alpha = (5.0, 0.35) if recipe == BASELINE else (1.3, 1.0)
    axes.plot(
        steps, smooth(values.mean(axis=0)), color=recipe_colour(recipe), linewidth=width, alpha=alpha, label=recipe
    )
    for step in {step for run in runs for step in phase_starts(run.records)}:
        mark_phase(axes, step, recipe_colour(recipe))
    return True


def draw_difference(axes: Axes, comparison: Comparison, recipe: str) -> list[np.ndarray]:
    """Plot a recipe's paired difference, averaged over seeds, raw and smoothed; returns values that must be within the
    axes.
    """
    shade, pairs = recipe_colour(recipe), comparison.pairs(recipe)
    if recipe == BASELINE or not pairs:
        return []
    steps, values = stack_series([loss_difference(run.losses, baseline.losses) for run, baseline in pairs])
    axes.plot(steps, values.mean(axis=0), color=shade, alpha=0.2, linewidth=0.6)
    smoothed = np.array([smooth(row, 10) for row in values])
    mean = smoothed.mean(axis=0)
    error = np.zeros_like(mean)
    if len(pairs) > 1:
        error = smoothed.std(axis=0, ddof=1) / len(pairs) ** 0.5
        axes.fill_between(steps, mean - error, mean + error, color=shade, alpha=0.13, linewidth=0)
    axes.plot(steps, mean, color=shade, linewidth=1.8)
    first = len(mean) // 20  # the first steps differ most and mean least
    return [(mean - error)[first:], (mean + error)[first:], np.array(final_values(comparison.row(recipe)))]


def final_label(row: RecipeRow) -> str:
    """Return a recipe's label with its final validation difference and 95 % interval."""
    interval = "" if row.interval is None else f" ± {row.interval:.4f}"
    return f"{row.recipe}\n{row.difference:+.4f}{interval}"


def style_axes(values: np.ndarray) -> tuple[float, float]:
    """Return axis limits with a margin around values; single steps may be outside."""
    margin = 0.15 * float(values.max() - values.min()) + 1e-6
    return float(values.min()) - margin, float(values.max()) + margin


def loss_difference(left: Mapping[int, float], right: Mapping[int, float]) -> dict[int, float]:
    return {step: left[step] - right[step] for step in left if step in right}


def label_finals(axes: Axes, rows: Sequence[RecipeRow]) -> None:
    """Draw each recipe's final validation difference to the right of the axes: a dot, its standard error and a label.

    Dots are at their values; labels are moved vertically if they would overlap.
    """
    finals = {row.recipe: row.difference or 0.0 for row in rows}
    rows = sorted(rows, key=lambda row: finals[row.recipe])
    low, high = axes.get_ylim()
    transform = axes.get_yaxis_transform()  # x as a fraction of the axes' width, y in nats
    heights = spread([(finals[row.recipe] - low) / (high - low) for row in rows], 0.1)
    for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
        shade, dot = recipe_colour(row.recipe), (1.02 + 0.012 * (index % 3), finals[row.recipe])
        axes.plot([dot[0]] * 2, final_values(row), color=shade, linewidth=1.2, transform=transform, clip_on=False)
        axes.plot(*dot, "o", color=shade, markersize=5, transform=transform, clip_on=False)
        axes.annotate(
            final_label(row),
            dot,
            (1.075, height),
            xycoords=transform,
            textcoords="axes fraction",
            color=shade,
            va="center",
            fontsize=9.5,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": shade, "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def final_values(row: RecipeRow) -> tuple[float, float]:
    """Return the final difference minus and plus its standard error."""
    middle, error = row.difference or 0.0, row.error or 0.0
    return middle - error, middle + error


def spread(heights: Sequence[float], distance: float, low: float = 0.04, high: float = 0.96) -> list[float]:
    """Move ascending heights as little as needed to be `distance` apart within [low, high], or as far apart as fits."""
    distance = min(distance, (high - low) / max(1, len(heights) - 1))
    moved = np.array(heights, dtype=float)
    for _ in range(200):
        close = np.diff(moved) < distance - 1e-9 * distance
        if not close.any():
            break
        gap = np.where(close, distance - np.diff(moved), 0) / 2
        moved[:-1] -= gap
        moved[1:] += gap
    step = distance * np.arange(len(moved))
    moved = np.maximum.accumulate(np.maximum(moved, low) - step) + step
    return (np.minimum.accumulate((np.minimum(moved, high) + step[::-1])[::-1])[::-1] - step[::-1]).tolist()


def series(values: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(values)
    return np.array(steps), np.array([values[step] for step in steps])


def stack_series(curves: Sequence[Mapping[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that all curves have, and each curve's values there, [curves, steps]."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in curves])


def smooth(values: np.ndarray, parts: int = 20) -> np.ndarray:
    """Centred moving mean over a window of 1 / `parts` of the curve, narrower at both ends."""
    half = len(values) // parts // 2
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    back = np.minimum(half, index)
    ahead = np.minimum(back, len(values) - 1 - index)
    return (total[index + ahead + 1] - total[index - back]) / (ahead + back + 1)


def finish_figure(axes: Axes, x: str, y: str, title: str, pad: float = 6) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=12, pad=pad)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write(figure: Figure, path: Path) -> Path:
    with files.replacing(path) as partial, partial.open("xb") as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
