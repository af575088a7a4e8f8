"""docs/parallel.md has each recipe under each way to spread a model, as the tests compare or the library refuses it."""

from tests.torch.parallel import page


def test_every_recipe_under_every_way_is_tested_or_refused() -> None:
    text = page.PAGE.read_text()
    assert page.written(text) == text, "run python -m tests.torch.parallel.page"
