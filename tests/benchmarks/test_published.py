"""The ledger predicts published measurements, and two pages show its predictions."""

import re
from pathlib import Path

import pytest

from benchmarks.pages.performance import DESIGN, PAGES, TABLES, between, filled
from benchmarks.pages.published import TE_MATRICES, TE_TOKENS, of_torchao, of_transformer_engine, other_cards, seven
from quaver.costs.hardware import GPUS, TE_FLOPS

#: How near a prediction is to be.
NEAR = 0.15


def test_at_least_six_of_seven_published_figures_are_predicted_within_15_percent() -> None:
    predictions = seven()
    shown = "\n".join(f"{f.what}: {f.published:.3f}, predicted {f.predicted:.3f} ({f.error:+.1%})" for f in predictions)
    print(shown)
    assert len(predictions) == 7
    assert sum(abs(f.error) <= NEAR for f in predictions) >= 6, shown


def test_the_figures_are_as_published() -> None:
    assert [f.published for f in seven()] == [20.285, 18.978, 22.882, 1.111733, 1.426141, 1.729502, 1.711090]


def test_the_calibrated_rows_come_out_of_their_shapes() -> None:
    assert 6 * TE_TOKENS * sum(n * k for n, k in TE_MATRICES) == TE_FLOPS


def test_a_column_that_nothing_was_fitted_to_is_near_too() -> None:
    assert all(abs(f.error) <= NEAR for f in of_transformer_engine("b300"))


def test_claims_about_the_torchao_card_hold() -> None:
    near = [sum(abs(f.error) <= NEAR for f in of_torchao(card)) for card in other_cards().values()]
    assert near == [4, 1]
    assert all(f.error < 0 for f in of_torchao())


def test_every_table_is_on_one_page() -> None:
    assert sorted(name for names in PAGES.values() for name in names) == sorted(TABLES)


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in PAGES.items() for name in names])
def test_tables_of_pages_match_the_ledger(page: Path, name: str) -> None:
    place = between(name).search(page.read_text(encoding="utf-8"))
    assert place, f"{page} has no place for the table {name!r}"
    written = place[0].splitlines()[1:-1]
    assert written == TABLES[name]().splitlines(), "run python -m benchmarks.pages.performance"


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 places for the table 'rates'"):
        filled("# Performance\n", ["rates"])


def test_every_card_is_on_the_page() -> None:
    text = DESIGN.read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in GPUS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((\.\.?/[^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
