"""fully_shard with weights gathered as codes is fully_shard with weights in high precision, bit for bit."""

from collections.abc import Callable
from pathlib import Path

from quaver import recipes
from tests import two_ranks
from tests.torch.parallel.fsdp.test_operands import RECIPES
from tests.torch.parallel.fsdp.training import assert_same


def of_recipe(name: str) -> Callable[[int], None]:
    def case(rank: int) -> None:
        _, codes = assert_same(RECIPES[name]())
        assert codes.traffic.agreements <= 20 + 1, "one a step, and one that compares what was prepared"

    case.__name__ = name
    return case


#: Options of a recipe travel as the recipe does; their operands are compared in `test_operands`.
CASES = {2: [of_recipe(name) for name in recipes.RECIPES if name != "bf16"]}


def test_two_ranks(tmp_path: Path) -> None:
    two_ranks.run(__name__, tmp_path, 2)


if __name__ == "__main__":
    two_ranks.main(CASES[two_ranks.world()])
