"""Noise of the logits in each family: `python -m tests.torch.conversion.logits` writes its table."""

import copy
import functools
import warnings

import torch

import quaver.torch as qt
from tests.torch.conversion.coverage import PAGE
from tests.torch.conversion.families import FAMILIES, tiny, tokens

BEGIN, END = "<!-- python -m tests.torch.conversion.logits writes from here -->", "<!-- to here, logits -->"
#: Of one scale a tensor; `delayed` begins with the same numbers.
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp6", "nvfp4", "mxfp4")
#: Batches that a figure is the mean of.
BATCHES = 3


@functools.cache
def decibels(family: str) -> tuple[float, ...]:
    """Of each recipe: the logits of the model in float32 over their distance from the converted model's."""
    plain = tiny(family).eval()
    batches = [tokens(seed) for seed in range(BATCHES)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = [plain(input_ids=x, labels=x).logits for x in batches]
        figures = []
        for recipe in RECIPES:
            model = copy.deepcopy(plain)
            qt.convert(model, recipe)
            logits = [model(input_ids=x, labels=x).logits for x in batches]
            off = [(y - z).norm() / z.norm() for y, z in zip(logits, exact, strict=True)]
            figures.append(-20 * torch.stack(off).log10().mean().item())
    return tuple(figures)


def line(family: str) -> str:
    """The row of one family."""
    return f"| {' | '.join((family, *(f'{figure:.0f}' for figure in decibels(family))))} |"


def shown(page: str) -> dict[str, list[int]]:
    """The figures that a page has, by family."""
    _, _, rest = page.partition(BEGIN)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rest.partition(END)[0].split("\n") if "|" in row]
    return {family: list(map(int, cells)) for family, *cells in rows[2:]}


def written(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = [f"| {' | '.join(('family', *(f'`{recipe}`' for recipe in RECIPES)))} |", f"|---|{'---:|' * len(RECIPES)}"]
    return "\n".join([before + BEGIN, "", *head, *map(line, sorted(FAMILIES)), "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
