"""Plots of losses: of one run, and of several runs with the differences on their own axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quaver.comparison.plot import GREY, finish_figure, loss_difference, mark_phase, recipe_colour, series, smooth
from quaver.train import config as recipe_name
from quaver.train import files
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


def write(figure: Figure, path: Path) -> Path:
    with files.replacing(path) as partial, partial.open("xb") as file:
        FigureCanvasAgg(figure).print_png(file)
    return path
