"""Plots: each recipe has its own colour, and each end label is next to its value."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from quaver import recipes
from quaver.train import plots
from quaver.train.compare import Comparison
from quaver.train.report import COLOURS, recipe_colour
from tests.train.conftest import MakeConfig
from tests.train.test_compare import made_up

MANY = {
    "nvfp4": 0.02,
    "delayed(history=16)": 0.001,
    "mxfp8": 0.0011,
    "rowwise": 0.0,
    "rowwise_bf16_wgrad": -0.0005,
    "blockwise": 0.001,
    "tensorwise": 0.001,
    "delayed": 0.0012,
    "mxfp8(attention=True)": 0.003,
}


def compared(offsets: dict[str, float], make_config: MakeConfig) -> Comparison:
    runs = [
        made_up(name, seed, offset * (1 + seed), make_config) for name, offset in offsets.items() for seed in (0, 1)
    ]
    return Comparison(folder=Path(), runs=tuple(runs), jobs=1)


def line_colours(figure: Figure) -> dict[str, str]:
    """The colour of each recipe's line in the upper picture."""
    return {str(line.get_label()): str(line.get_color()) for line in figure.axes[0].lines}


def labels(figure: Figure) -> dict[str, Annotation]:
    """The end labels of the lower picture by recipe."""
    annotations = [text for text in figure.axes[1].texts if isinstance(text, Annotation)]
    return {text.get_text().splitlines()[0]: text for text in annotations}


def test_every_recipe_has_its_own_colour() -> None:
    assert set(recipes.RECIPES) <= set(COLOURS), "a new recipe gets a row in quaver/train/report.py"
    assert len(set(COLOURS.values())) == len(COLOURS)
    texts = [*COLOURS, *(f"delayed(history={n})" for n in range(1, 100))]
    assert len({recipe_colour(text) for text in texts if text.partition("(")[0] in recipes.RECIPES}) >= 99


@pytest.mark.parametrize(
    "text, same", [("mxfp8()", "mxfp8"), ("delayed( margin = 1,history=4)", "delayed(history=4, margin=1)")]
)
def test_two_texts_of_one_recipe_have_one_colour(text: str, same: str) -> None:
    assert recipe_colour(text) == recipe_colour(same)
    assert recipe_colour("delayed(history=4)") not in (*COLOURS.values(), recipe_colour("delayed(history=5)"))


def test_a_recipe_has_the_same_colour_in_every_set_and_order(make_config: MakeConfig) -> None:
    every = {"bf16": 0.0, **MANY}
    whole = line_colours(plots.comparison_figure(compared(every, make_config)))
    assert list(whole) == list(every) and len(set(whole.values())) == len(whole)
    backwards = line_colours(plots.comparison_figure(compared(dict(reversed(every.items())), make_config)))
    assert backwards == whole
    for name in MANY:
        few = plots.comparison_figure(compared({"bf16": 0.0, name: MANY[name]}, make_config))
        assert line_colours(few) == {"bf16": whole["bf16"], name: whole[name]}
        assert labels(few)[name].get_color() == whole[name]


def test_end_labels_are_beside_the_final_differences_and_do_not_overlap(make_config: MakeConfig) -> None:
    comparison = compared({"bf16": 0.0, **MANY}, make_config)
    figure = plots.comparison_figure(comparison)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = labels(figure)
    assert set(shown) == set(MANY)
    boxes = {name: Text.get_window_extent(text, canvas.get_renderer()) for name, text in shown.items()}
    for left, right in combinations(boxes, 2):
        assert not boxes[left].overlaps(boxes[right]), f"{left} covers {right}"
    for name, text in shown.items():
        assert text.xy[1] == comparison.row(name).difference  # the dot that its thin line leads to
        assert (
            boxes[name].x1 <= figure.bbox.x1 and figure.bbox.y0 <= boxes[name].y0 and boxes[name].y1 <= figure.bbox.y1
        )
    heights = sorted(MANY, key=lambda name: boxes[name].y0)
    differences = [comparison.row(name).difference for name in heights]
    assert differences == sorted(differences, key=lambda value: value or 0.0)


def test_a_picture_is_whole_and_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "mine"
    precious.write_text("precious")
    picture = tmp_path / "loss.png"
    picture.symlink_to(precious)
    records = [{"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 2.5}]
    plots.plot_loss(records, picture, "a run", "mxfp4")
    assert (
        precious.read_text() == "precious" and picture.read_bytes().startswith(b"\x89PNG") and not picture.is_symlink()
    )
    picture.unlink()
    picture.mkdir()
    with pytest.raises(ValueError, match=r"loss\.png is a folder, not a file; move it away"):
        plots.plot_loss(records, picture, "a run", "mxfp4")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "loss.png"}


def test_runs_are_drawn_beside_the_first_and_its_differences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write", lambda figure, path: (drawn.append(figure), path)[1])
    one = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 5)]
    other = [{"step": step, "loss": 3.0 - step / 10 + 0.25 * (step == 2)} for step in range(2, 6)]
    plots.plot_runs({"one": one, "ranks": other}, tmp_path / "runs.png")
    upper, lower = drawn[0].axes
    assert [str(line.get_label()) for line in upper.lines] == ["one", "ranks"]
    _, difference = lower.lines
    steps, values = difference.get_data()
    assert list(steps) == [2, 3, 4] and list(values) == pytest.approx([0.25, 0, 0], abs=1e-12)
    with pytest.raises(ValueError, match="ranks has no step that one has"):
        plots.plot_runs({"one": one, "ranks": [{"step": 9, "loss": 1.0}]}, tmp_path / "runs.png")


def test_a_change_of_the_recipe_is_marked_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write", lambda figure, path: (drawn.append(figure), path)[1])
    text = "nvfp4 until 7, bf16"
    changed = made_up(text, 0, 0.1, make_config)
    records = [{**r, "part": 1 + (r["step"] > 7)} if "loss" in r else r for r in changed.records]

    def marks(figure: Figure) -> list[list[float]]:
        return [
            [float(line.get_xdata()[0]) for line in axes.lines if line.get_linestyle() == ":"] for axes in figure.axes
        ]

    plots.plot_loss(records, tmp_path / "loss.png", "a run", text)
    assert marks(drawn[0]) == [[7.5]] and "bf16" in [mark.get_text() for mark in drawn[0].axes[0].texts]
    plots.plot_runs({"one": records, "other": list(made_up("bf16", 0, 0, make_config).records)}, tmp_path / "runs.png")
    assert marks(drawn[1]) == [[], []], "the first run is the broad line"
    plots.plot_runs({"other": list(made_up("bf16", 0, 0, make_config).records), "one": records}, tmp_path / "runs.png")
    assert marks(drawn[2]) == [[7.5], []]
    runs = made_up("bf16", 0, 0, make_config), replace(changed, records=tuple(records))
    figure = plots.comparison_figure(Comparison(folder=Path(), runs=runs, jobs=1))
    assert marks(figure)[0] == [7.5] and labels(figure)[text].get_color() == recipe_colour(text)
    assert recipe_colour(text) not in COLOURS.values() and recipe_colour(text) == recipe_colour("nvfp4  until 7,bf16()")
    assert recipe_colour(text) != recipe_colour("nvfp4 until 8, bf16")
