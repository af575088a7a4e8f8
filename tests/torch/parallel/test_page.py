"""docs/design/parallel-matrix.md lists every recipe with every kind of parallelism: tested steps, or the error."""

from tests.torch.parallel import page


def test_every_recipe_is_tested_or_refused_under_every_parallelism() -> None:
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run python -m tests.torch.parallel.page"
