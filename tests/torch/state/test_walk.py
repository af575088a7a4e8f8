"""Whatever a loop does with a model, each forward and backward is that of a fresh copy: see
`tests.torch.state.walk`."""

import random

import pytest

from quaver import recipes
from tests.torch.state.walk import MODELS, walk

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
KINDS = pytest.mark.parametrize("kind", MODELS)


@KINDS
def test_whatever_a_loop_does_each_result_matches_a_fresh_copy(kind: str) -> None:
    # Alternate over recipes: the next kind of model gets the others.
    for recipe in QUANTIZING[list(MODELS).index(kind) % 2 :: 2]:
        walk(kind, recipe, 0, 7)


@pytest.mark.slow
@KINDS
def test_a_long_walk_gives_the_results_of_fresh_copies(kind: str) -> None:
    chosen = random.Random(kind)
    for _ in range(250):
        walk(kind, chosen.choice(QUANTIZING), chosen.randrange(10**9), 60)
