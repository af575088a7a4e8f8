"""The ledger predicts what others measured, and docs/performance.md says what the ledger predicts."""

import re

import pytest

from benchmarks.pages.performance import PAGE, TABLES, between, filled
from benchmarks.pages.published import TE_MATRICES, TE_TOKENS, of_torchao, of_transformer_engine, other_cards, seven
from quaver.core.costs.gpus import GPUS, TE_FLOPS

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


def test_what_the_page_says_of_torchaos_card_is_so() -> None:
    near = [sum(abs(f.error) <= NEAR for f in of_torchao(card)) for card in other_cards().values()]
    assert near == [4, 1]
    assert all(f.error < 0 for f in of_torchao())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_what_the_ledger_says(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    place = between(name).search(text)
    assert place, f"docs/performance.md has no place for the table {name!r}"
    written = place[0].splitlines()[1:-1]
    assert written == TABLES[name]().splitlines(), "run python -m benchmarks.pages.performance"


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 places for the table 'rates'"):
        filled("# Performance\n")


def test_every_card_is_on_the_page_and_links_lead_to_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in GPUS)
    for target in re.findall(r"\]\((\.\.?/[^)#]+)", text):
        assert (PAGE.parent / target).exists(), target
