"""Plot of a comparison: losses, and differences from the baseline beside the band that a null run covers."""

from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quaver import recipes
from quaver.comparison.results import NULL, Comparison, signed
from quaver.recipes.schedule import read

# ---- colours ----
# Colours of recipes, the same in all pictures.
#
# Source: Okabe and Ito's colour-blind safe palette (without their yellow, which is too pale for a line).

GREY = "#444444"

COLOURS = {
    "bf16": GREY,
    NULL: "#8A8A8A",
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
        text: a recipe or a schedule, however it is written; or any other name.
    """
    if text == NULL:
        return COLOURS[NULL]
    try:
        parts = [(part.recipe, part.end) for part in read(text, recipes.get)]
    except ValueError:
        drawn = crc32(text.encode())
    else:
        recipe = parts[0][0]
        if len(parts) == 1 and recipe == recipes.get(recipe.name):
            return COLOURS[recipe.name]
        drawn = crc32(repr(parts if len(parts) > 1 else recipe).encode())
    red_green_blue = hsv_to_rgb((drawn & 0xFFFF) / 0x10000, 0.85, 0.45 + 0.35 * (drawn >> 16) / 0x10000)
    return "#" + "".join(f"{round(255 * part):02X}" for part in red_green_blue)


# ---- curves ----


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


def loss_difference(left: Mapping[int, float], right: Mapping[int, float]) -> dict[int, float]:
    return {step: left[step] - right[step] for step in left if step in right}


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


def finish_figure(axes: Axes, x: str, y: str, title: str, pad: float = 6) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=12, pad=pad)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ---- comparison ----


def write_png(comparison: Comparison, path: Path) -> None:
    """Write the plot of a comparison into a new file."""
    with path.open("xb") as file:
        FigureCanvasAgg(comparison_figure(comparison)).print_png(file)


def comparison_figure(comparison: Comparison) -> Figure:
    """Return a figure: above, each recipe's training loss; below, its paired difference from the baseline."""
    figure = Figure(figsize=(10, 8.5), dpi=150, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.5])
    for recipe in comparison.recipes:
        draw_losses(upper, comparison, recipe)
    shown = [values for recipe in comparison.recipes for values in draw_difference(lower, comparison, recipe)]
    if upper.lines:
        upper.legend(frameon=False, ncols=2)
    seeds = f"n = {comparison.seeds} seed{'s' * (comparison.seeds > 1)}" + ", emulated" * comparison.emulated
    finish_figure(upper, "", "loss (nats)", f"Training loss, mean of {seeds}")
    lower.axhline(0, color=GREY, linewidth=1.2)
    for edge in (-comparison.margin, comparison.margin):
        lower.axhline(edge, color=GREY, linewidth=1.0, linestyle=":")
    low, high = axis_limits(np.concatenate([*shown, [-comparison.margin, comparison.margin]]))
    lower.set_ylim(low, high)
    label_finals(lower, [row for row in comparison.rows if row["difference"] is not None])
    finish_figure(lower, "step", "nats", f"Difference from {comparison.baseline}, same seed, {seeds}", pad=22)
    key = f"thin: each step, thick: moving mean, dotted: margin ±{comparison.margin:g}"
    key += ", grey: null band" * (NULL in comparison.recipes) + "; right: 95 % intervals" * (comparison.seeds > 1)
    lower.text(0, 1.02, key, transform=lower.transAxes, fontsize=9, color=GREY)
    return figure


def draw_losses(axes: Axes, comparison: Comparison, recipe: str) -> None:
    """Plot a recipe's training loss, averaged over seeds; the baseline is a broad line under the others."""
    runs = list(comparison.finished(recipe).values())
    if not runs:
        return
    steps, values = stack_series([run.losses for run in runs])
    width, alpha = (5.0, 0.35) if recipe == comparison.baseline else (1.3, 1.0)
    shade = recipe_colour(recipe)
    axes.plot(steps, smooth(values.mean(axis=0)), color=shade, linewidth=width, alpha=alpha, label=recipe)
    for step in {step for run in runs for step in run.changes}:
        mark_phase(axes, step, shade)


def draw_difference(axes: Axes, comparison: Comparison, recipe: str) -> list[np.ndarray]:
    """Plot a recipe's paired difference, averaged over seeds, raw and smoothed; returns values that must be within the
    axes.

    The null run is drawn as a band around 0 as wide as the largest smoothed difference of all its seeds.
    """
    shade, pairs = recipe_colour(recipe), comparison.pairs(recipe)
    if recipe == comparison.baseline or not pairs:
        return []
    steps, values = stack_series([loss_difference(run.losses, baseline.losses) for run, baseline in pairs])
    smoothed = np.array([smooth(row, 10) for row in values])
    first = len(steps) // 20  # the first steps differ most and mean least
    if recipe == NULL:
        band = np.abs(smoothed).max(axis=0)
        axes.fill_between(steps, -band, band, color=shade, alpha=0.35, linewidth=0)
        return [-band[first:], band[first:]]
    axes.plot(steps, values.mean(axis=0), color=shade, alpha=0.2, linewidth=0.6)
    axes.plot(steps, smoothed.mean(axis=0), color=shade, linewidth=1.8)
    return [smoothed.mean(axis=0)[first:], np.array([comparison.row(recipe)["difference"] or 0.0])]


def axis_limits(values: np.ndarray) -> tuple[float, float]:
    """Return axis limits with a margin around values; single steps may be outside."""
    margin = 0.15 * float(values.max() - values.min()) + 1e-6
    return float(values.min()) - margin, float(values.max()) + margin


def final_label(row: Mapping[str, Any]) -> str:
    """Return a recipe's label with its difference, half of the 95 % interval, and the first word of the verdict."""
    label = f"{row['recipe']}\n{signed(row['difference'])}"
    if row["low"] is None:
        return label
    half = signed((row["high"] - row["low"]) / 2).lstrip("+")
    return f"{label} ± {half}\n{row['verdict'].split()[0].strip(':')}"


def label_finals(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw each recipe's difference to the right of the axes: a dot, its 95 % interval within the axes, and a label.

    Dots are at their values; labels are moved vertically if they would overlap.
    """
    rows = sorted(rows, key=lambda row: row["difference"])
    low, high = axes.get_ylim()
    transform = axes.get_yaxis_transform()  # x as a fraction of the axes' width, y in nats
    heights = spread([(row["difference"] - low) / (high - low) for row in rows], 0.13)
    for index, (row, height) in enumerate(zip(rows, heights, strict=True)):
        shade, dot = recipe_colour(row["recipe"]), (1.02 + 0.012 * (index % 3), row["difference"])
        if row["low"] is not None:
            ends = np.clip([row["low"], row["high"]], low, high)
            axes.plot([dot[0]] * 2, ends, color=shade, linewidth=1.2, transform=transform, clip_on=False)
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
