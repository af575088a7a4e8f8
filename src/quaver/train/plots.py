"""Plots of losses, of one run and of several, and heat maps of inspected layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quaver.comparison.plot import GREY, finish_figure, loss_difference, mark_phase, recipe_colour, series, smooth
from quaver.train import config as recipe_name
from quaver.train import files
from quaver.train.inspection_table import RESULTS, STATISTICS, ReportTable, without_common_start
from quaver.train.metrics import Record, losses, phase_starts, validation_losses

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


def plot_inspection(table: ReportTable, statistic: str, path: Path) -> Path:
    """Write a heat map of layers and sampled steps for each result that has a statistic, or for each operand.

    Raises: ValueError if no tensor has a value of the statistic.
    """
    having = [key for key, statistics in table.values.items() if statistic in statistics]
    shown = [key for key in having if key[1] in RESULTS] or having
    if not shown:
        raise ValueError(f"no tensor has a value of {statistic}; give another --statistic")
    arrays = {key: table.values[key][statistic] for key in shown}
    # Attention has panels of its own: its layers have no other GEMMs.
    groups = [[key for key in shown if (key[0] == "attention") == attention] for attention in (False, True)]
    rows = [group[i : i + 3] for group in groups for i in range(0, len(group), 3)]
    layers = [
        [i for i in range(len(table.layers)) if any(np.isfinite(arrays[k][i]).any() for k in row)] for row in rows
    ]
    heights = [0.14 * len(own) + 0.8 for own in layers]
    figure = Figure(figsize=(11, min(sum(heights) + 0.4, 40)), dpi=150, layout="constrained")
    grid = figure.subplots(len(rows), 3, squeeze=False, sharex=True, height_ratios=heights)
    low, high = min(map(np.nanmin, arrays.values())), max(map(np.nanmax, arrays.values()))
    shade, names = "viridis_r" if statistic == "snr" else "viridis", without_common_start(table.layers)
    places = np.unique(np.linspace(0, len(table.steps) - 1, 4).round().astype(int))
    for row, own, line in zip(rows, layers, grid, strict=True):
        for axes in line[len(row) :]:
            axes.set_axis_off()
        for axes, key in zip(line, row, strict=False):
            drawn = axes.imshow(
                arrays[key][own], aspect="auto", interpolation="nearest", cmap=shade, vmin=low, vmax=high
            )
            axes.set_title(f"{key[0]}, {key[1]}", loc="left", fontsize=10)
            axes.set_facecolor("#DDDDDD")
            axes.set_yticks([])
            axes.set_xticks(places, [str(table.steps[place]) for place in places])
        every = -(-len(own) // 100)
        line[0].set_yticks(range(0, len(own), every), [names[i] for i in own[::every]], fontsize=6)
    grid[-1, 0].set_xlabel("step")
    figure.colorbar(drawn, ax=grid, label=STATISTICS[statistic], aspect=40)
    return write(figure, path)


def write(figure: Figure, path: Path) -> Path:
    with files.replacing(path) as partial, partial.open("xb") as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
