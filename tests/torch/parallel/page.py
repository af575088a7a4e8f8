"""The table of docs/design/parallel-matrix.md: recipes by kind of parallelism, tested steps or the error.

The steps are those of the lists that the tests run, quick ones and slow; what stands in none must be refused where it
is called.
`python -m tests.torch.parallel.page` writes the table anew; a test compares them.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import quaver.torch as qt
from quaver import recipes
from quaver.torch import parallel
from tests.torch.parallel import test_pipeline, test_pipeline_mesh
from tests.torch.parallel import test_quantized_gradients as test_gradients
from tests.torch.parallel.context import test_context_parallel as test_applying
from tests.torch.parallel.fsdp import test_codes
from tests.torch.parallel.fsdp import test_gather as test_gathering
from tests.torch.parallel.moe import test_dispatch
from tests.torch.parallel.moe import test_expert_parallel as test_experts
from tests.torch.parallel.tensor import matrices, test_mesh, test_styles, vocabulary

PAGE = Path(__file__).parents[3] / "docs" / "design" / "parallel-matrix.md"
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
        parallel.all_to_all(torch.randn(8, 64), parallel.AllToAllSplits((8,), (8,)), recipes.get(recipe).fprop.a)


def divide(recipe: str) -> None:
    """Among this process alone."""
    with alone(), qt.autocast(recipe):
        moe = qt.MoE(64, 64, qt.MixtureConfig(experts=2, k=1))
        parallelize_module(moe, init_device_mesh("cpu", (1,)), parallel.ExpertParallel())(torch.randn(8, 64))


def sent() -> dict[str, int]:
    """Recipes with exchanged inputs in the tests; high precision is sent unchanged."""
    specs = test_dispatch.specs()
    inputs = {name: recipes.get(name).fprop.a for name in recipes.RECIPES}
    return {name: 1 for name, spec in inputs.items() if spec is None or spec in specs}


class Row(NamedTuple):
    """A parallelism or a combination of several."""

    name: str
    #: Steps compared by the quick tests, by recipe.
    quick: Mapping[Any, int]
    #: Steps compared by the slow tests, by recipe.
    slow: Mapping[Any, int] = MappingProxyType({})
    #: Calls it under a recipe in neither of them, which must raise.
    call: Callable[[str], None] | None = None


def rows() -> list[Row]:
    """The rows of the table, from the lists that the tests run."""
    hows = ("gather", "ring", "all_to_all")
    gathered, frozen, both = test_gathering, test_gathering.STORED, test_applying.WITH_HEADS
    return [
        Row("`gather_quantized`, `fully_shard`", gathered.QUICK, dict.fromkeys(gathered._OWN, gathered.STEPS), gather),
        Row("the same, after `ColwiseParallel`, `RowwiseParallel`", test_mesh.STEPS, test_mesh.LONG),
        Row("`quantized_init`, `fully_shard`, frozen", frozen, dict.fromkeys(frozen, gathered.STEPS), store),
        Row(
            "the same, stepped by `quaver.torch.optim`",
            dict.fromkeys(test_codes.RECIPES, test_codes.STEPS),
            dict.fromkeys(test_codes.RECIPES, test_codes.ALL_STEPS),
            learn,
        ),
        Row("`ColwiseParallel`, `RowwiseParallel`, tokens in parts", test_styles.STEPS, test_styles.LONG),
        Row("`HeadParallel`: several matrices in one weight", matrices.STEPS, matrices.LONG),
        Row("`VocabParallel`: a quantized head, its loss", vocabulary.HEADS, vocabulary.LONG),
        *(Row(f'`context_parallel(how="{how}")`', test_applying.ALONE[how], test_applying.LONG[how]) for how in hows),
        *(
            Row(
                f'`how="{how}"`, after `HeadParallel`, `ColwiseParallel`, `RowwiseParallel`',
                both[how],
                test_applying.LONG[how],
            )
            for how in hows
        ),
        Row("`all_to_all`", sent(), call=send),
        Row("`ExpertParallel`", test_experts.STEPS, call=divide),
        Row("`quantize_gradients`", test_gradients.TRAINED, test_gradients.LONG),
        Row("stages, backwards in two parts", test_pipeline.SPLIT, test_pipeline.LONG),
        Row("stages by 1F1B, `fully_shard`", test_pipeline_mesh.STEPS, test_pipeline_mesh.LONG),
    ]


def cell(row: Row, recipe: str) -> str:
    """Steps of the slow tests, in brackets those of the quick ones where they are fewer; "" where there are none."""
    quick, slow = row.quick.get(recipe, 0), row.slow.get(recipe, 0)
    if slow > quick:
        return f"{slow} ({quick or 'slow'})"
    return str(quick) if quick else ""


def table() -> str:
    """The table of every recipe under every parallelism."""
    heads = ["", *(f"`{name}`" for name in recipes.RECIPES)]
    lines, refusals = [heads, ["---", *["---:"] * len(recipes.RECIPES)]], []
    for row in rows():
        line = [row.name]
        for name in recipes.RECIPES:
            steps = cell(row, name)
            if steps:
                line.append(steps)
                continue
            assert row.call is not None, f"{row.name} under {name} is neither tested nor refused"
            try:
                row.call(name)
            except ValueError as error:
                refusals.append(f"{row.name} under `{name}`: " + "; ".join(str(error).splitlines()))
                line.append(f"refused [{len(refusals)}]")
            else:
                raise AssertionError(f"{row.name} under {name} is neither tested nor refused")
        lines.append(line)
    notes = "".join(
        f"{textwrap.fill(f'{number}. {refusal}', 110, subsequent_indent='   ')}\n"
        for number, refusal in enumerate(refusals, 1)
    )
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + ("\n" + notes if notes else "")


def written(page: str) -> str:
    """The page with this table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
