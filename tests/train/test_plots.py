"""Plots: each recipe has its own colour, and each end label is next to its value."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from quaver import recipes
from quaver.comparison.plot import COLOURS, recipe_colour
from quaver.train import plots


def test_every_recipe_has_its_own_colour() -> None:
    assert set(recipes.RECIPES) <= set(COLOURS), "a new recipe gets a row in quaver/comparison/plot.py"
    assert len(set(COLOURS.values())) == len(COLOURS)
    texts = [*COLOURS, *(f"delayed(history={n})" for n in range(1, 100))]
    assert len({recipe_colour(text) for text in texts if text.partition("(")[0] in recipes.RECIPES}) >= 99


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
