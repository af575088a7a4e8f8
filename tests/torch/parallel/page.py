"""The table of docs/parallel.md of recipes under each way to spread a model: what tests compare, or a refusal.

The steps are those of the lists that the tests run; what stands in none of them must be refused where it is called.
`python -m tests.torch.parallel.page` writes the table anew; a test compares them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch import parallel
from tests.torch.parallel import test_pipeline, test_pipeline_mesh
from tests.torch.parallel.context import test_applying
from tests.torch.parallel.fsdp import test_codes, test_gathering
from tests.torch.parallel.quantized import test_dispatch, test_experts, test_gradients
from tests.torch.parallel.tensor import matrices, test_mesh, test_styles, vocabulary

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"
BEGIN = "<!-- python -m tests.torch.parallel.page writes from here -->\n"
END = "<!-- to here, of python -m tests.torch.parallel.page -->\n"


def gather(recipe: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    qt.convert(net, recipe)
    parallel.gather_quantized(net)


def store(recipe: str) -> None:
    with qt.quantized_init(recipe):
        qt.Linear(64, 64, recipe=recipe)


def learn(recipe: str) -> None:
    with qt.quantized_init(recipe):
        net = nn.Sequential(qt.Linear(64, 64, recipe=recipe))
    net[0].weight.requires_grad_(True)
    parallel.gather_quantized(net)


@contextmanager
def alone() -> Iterator[None]:
    """In a group of this process, unless there is one."""
    first = not dist.is_initialized()
    if first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if first:
            dist.destroy_process_group()


def send(recipe: str) -> None:
    """To this process alone."""
    with alone():
        parallel.exchange(torch.randn(8, 64), parallel.Splits((8,), (8,)), recipes.get(recipe).fprop.a)


def divide(recipe: str) -> None:
    """Among this process alone."""
    with alone(), qt.autocast(recipe):
        moe = qt.MoE(64, 64, qt.Mixture(experts=2, k=1))
        parallelize_module(moe, init_device_mesh("cpu", (1,)), parallel.ExpertParallel())(torch.randn(8, 64))


def sent() -> dict[str, int]:
    """Recipes whose inputs the tests exchange; in high precision they go as they are."""
    specs = test_dispatch.specs()
    inputs = {name: recipes.get(name).fprop.a for name in recipes.RECIPES}
    return {name: 1 for name, spec in inputs.items() if spec is None or spec in specs}


#: A way's name, the steps of it that tests compare under each recipe, and what calls it under one that is in none.
Row = tuple[str, Mapping[str | None, int] | Mapping[str, int], Callable[[str], None] | None]


def rows() -> list[Row]:
    ways = [f'`context_parallel(how="{how}")`' for how in ("gather", "ring", "all_to_all")]
    in_stages = {recipe: steps for name, recipe, steps, _ in test_pipeline_mesh.cases() if name == "1F1B"}
    return [
        ("`gather_quantized`, `fully_shard`", dict.fromkeys(test_gathering._OWN, test_gathering.STEPS), gather),
        ("the same, after `Column`, `Row`", test_mesh.STEPS, None),
        ("`quantized_init`, `fully_shard`, frozen", test_gathering.STORED, store),
        ("the same, stepped by `quaver.torch.optim`", dict.fromkeys(test_codes.LEARN, test_codes.STEPS), learn),
        ("`Column`, `Row`, tokens in parts", test_styles.STEPS, None),
        ("`Heads`: several matrices in one weight", matrices.STEPS, None),
        ("`Vocabulary`: a quantized head, its loss", vocabulary.HEADS, None),
        *((way, test_applying.ALONE | test_applying.HISTORIES, None) for way in ways),
        ("`exchange`", sent(), send),
        ("`ExpertParallel`", test_experts.STEPS, divide),
        ("`quantize_gradients`", test_gradients.TRAINED, None),
        ("stages, backwards in two parts", test_pipeline.SPLIT, None),
        ("stages by 1F1B, `fully_shard`", in_stages, None),
    ]


def table() -> str:
    """Every recipe under every way."""
    heads = ["", *(f"`{name}`" for name in recipes.RECIPES)]
    lines, refusals = [heads, ["---", *["---:"] * len(recipes.RECIPES)]], []
    for way, tested, call in rows():
        line = [way]
        for name in recipes.RECIPES:
            if name in tested:
                line.append(str(tested[name]))  # type: ignore[index]
                continue
            assert call is not None, f"{way} under {name} is neither tested nor refused"
            try:
                call(name)
            except ValueError as error:
                refusals.append(f"{way} under `{name}`: " + "; ".join(str(error).splitlines()))
                line.append(f"refused ({len(refusals)})")
            else:
                raise AssertionError(f"{way} under {name} is neither tested nor refused")
        lines.append(line)
    said = "".join(f"{number}. {refusal}\n" for number, refusal in enumerate(refusals, 1))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + ("\n" + said if said else "")


def written(page: str) -> str:
    """The page with this table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
