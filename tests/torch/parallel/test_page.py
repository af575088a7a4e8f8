"""docs/design/parallel-matrix.md lists every recipe with every kind of parallelism: tested steps, or the error."""

from tests.torch.parallel import page


def test_every_recipe_under_every_way_is_tested_or_refused() -> None:
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run python -m tests.torch.parallel.page"
