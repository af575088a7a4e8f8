"""What an interpreter and a notebook show of a recipe and of a report."""

from html.parser import HTMLParser
from itertools import product

import pytest

import quaver
from quaver import recipes
from quaver.recipes.conversion import ConversionReport
from quaver.recipes.text import html_table

EVERY_OPTION = [
    *(recipes.get(name) for name in recipes.RECIPES),
    *(recipes.delayed(history=h, margin=m, format=f) for h, m, f in product((1, 1024), (0, 2), ("hybrid", "e4m3"))),
    *(recipes.get(name, attention=True) for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")),
    recipes.mxfp8(weight_2d=True),
]


class Text(HTMLParser):
    """The tags of a page in order, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("recipe", EVERY_OPTION, ids=str)
def test_a_recipe_prints_its_options_in_one_line(recipe: quaver.Recipe) -> None:
    shown = repr(recipe)
    assert shown.startswith(f"Recipe({recipe.name}: ") and len(shown) < 240 and "\n" not in shown
    assert all(str(spec) in shown for spec in recipe.operands().values() if spec is not None)
    assert {other for other in EVERY_OPTION if repr(other) == shown} == {recipe}


def test_a_report_repr_is_its_printed_form_and_notebooks_show_every_layer() -> None:
    mxfp8 = recipes.mxfp8()
    report = ConversionReport(
        {"a.up": mxfp8, "": mxfp8}, {"<b>": 'no "rule" & so on'}, ["*.hed"], {"Conv": 2}, "linear"
    )
    assert repr(report) == str(report) and repr(report).startswith("converted 2 to mxfp8\n")
    page = report._repr_html_()
    assert "<b>" not in page
    words = Text(page).words
    assert {"a.up", "(root)", "mxfp8", "<b>", 'no "rule" & so on', "converted 2 to mxfp8", "not linear: 2 Conv"} <= set(
        words
    )
    assert Text(ConversionReport()._repr_html_()).words == ["converted nothing"]


def test_cells_of_a_table_are_text() -> None:
    page = html_table(("<th>", "n"), [("<script>alert('x')</script>", 3)], caption="a & b")
    assert Text(page).words == ["a & b", "<th>", "n", "<script>alert('x')</script>", "3"]
    assert 'right">3' in page and "<script>" not in page
