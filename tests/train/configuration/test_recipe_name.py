import pytest

import quaver.recipes
from quaver.train.configuration import recipe_name


def test_a_list_splits_outside_parentheses() -> None:
    text = "bf16, delayed(history=4, margin=1),mxfp8"
    assert recipe_name.split(text) == ["bf16", "delayed(history=4, margin=1)", "mxfp8"]


@pytest.mark.parametrize("name", quaver.recipes.RECIPES)
def test_every_recipe_is_found_by_name(name: str) -> None:
    assert recipe_name.find(name) == quaver.recipes.get(name)


def test_options_reach_the_recipe() -> None:
    assert recipe_name.find("delayed(history=4)") == quaver.recipes.delayed(history=4)


@pytest.mark.parametrize("text", ["", "a b", "delayed(4)", "delayed(history=x)", "delayed(**{})", "__import__('os')"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        recipe_name.find(text)


def test_folders_are_plain_and_distinct() -> None:
    assert recipe_name.folder('delayed(history=16, format="e4m3")') == "delayed-history=16,format=e4m3"
