"""The table of docs/design/parallel.md: the multiples that each recipe and style require, from layouts and recipes.

`python -m tests.torch.parallel.tensor.page` writes it anew; a test compares them.
"""

import math
from pathlib import Path

from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel.tensor.gemms import ShardLayout

PAGE = Path(__file__).parents[4] / "docs" / "design" / "parallel.md"
BEGIN = "<!-- python -m tests.torch.parallel.tensor.page writes from here -->\n"
END = "<!-- to here -->\n"
LAYOUTS = [ShardLayout(column, sequence) for column in (True, False) for sequence in (False, True)]


def operands(recipe: Recipe, layout: ShardLayout) -> list[tuple[str, object, int]]:
    """Operands that are quantized in shards, with their specs and sharded axes."""
    gemms, plan = recipe, recipe.reuse
    each = [
        ("input", gemms.fprop.a, True),
        ("weight", gemms.fprop.b, True),
        ("grad_output", gemms.dgrad.a, True),
        ("weight.T", gemms.dgrad.b, not plan.weight),
        ("grad_output.T", gemms.wgrad.a, not plan.grad_output),
        ("input.T", gemms.wgrad.b, not plan.input),
    ]
    split = ((name, spec, layout.axis(name)) for name, spec, own in each if own and spec is not None)
    return [(name, spec, axis) for name, spec, axis in split if axis is not None]


def needed(recipe: Recipe, layout: ShardLayout, tokens: bool) -> int:
    """The number that must divide each rank's features, or its tokens of a sequence."""
    number = 1
    for name, spec, axis in operands(recipe, layout):
        if layout.of_tokens(name) is tokens:
            number = math.lcm(number, spec.block[axis] or 1)  # type: ignore[attr-defined]
            if axis == 1 and spec.hadamard:  # type: ignore[attr-defined]
                number = math.lcm(number, 16)
    return number


def agreed(recipe: Recipe, layout: ShardLayout) -> int:
    """Number of amaxes that ranks reduce in a forward and its backward."""
    return sum(spec.two_level or spec.block[axis] is None for _, spec, axis in operands(recipe, layout))  # type: ignore[attr-defined]


def table() -> str:
    """The table of every recipe under every style."""
    heads = ["recipe", *(f"`{layout.name}`" for layout in LAYOUTS)]
    rows = [heads, ["---"] * len(heads)]
    for name in recipes.RECIPES:
        recipe, row = recipes.get(name), [f"`{name}`"]
        for layout in LAYOUTS:
            features, of_tokens = needed(recipe, layout, False), needed(recipe, layout, True)
            label = f"{features}" + (f", tokens {of_tokens}" if layout.sequence else "")
            row.append(f"{label}; {agreed(recipe, layout)} amaxes")
        rows.append(row)
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def written(page: str) -> str:
    """The page with this table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
