"""What `convert` reaches in each family: `python -m tests.torch.conversion.coverage` writes its table."""

import functools
from collections import Counter
from pathlib import Path

import torch

import quaver.torch as qt
from quaver.torch.conversion.report import Check
from tests.torch.conversion.families import FAMILIES, tiny, tokens

PAGE = Path(__file__).parents[3] / "docs" / "design" / "model-coverage.md"
BEGIN, END = "<!-- python -m tests.torch.conversion.coverage writes from here -->", "<!-- to here -->"
HEADER = ("family", "parameters", "FLOPs", "converted", "left in high precision")


@functools.cache
def covered(family: str) -> tuple[qt.Report, Check, torch.Tensor]:
    """The report of a tiny model that is given a recipe alone, its check, and the loss of a training step."""
    model, x = tiny(family), tokens()
    report = qt.convert(model, "tensorwise")
    loss = model(input_ids=x, labels=x).loss
    loss.backward()
    return report, report.check(model, input_ids=x, labels=x), loss.detach()


def line(family: str) -> str:
    """The row of one family."""
    report, check, _ = covered(family)
    kinds = Counter(row.kind for row in report.rows if row.recipe is not None)
    left = Counter(row.name.rpartition(".")[2] for row in report.rows if row.recipe is None)
    behind = Counter(name.rpartition(".")[2] for name in check.read_behind)
    notes = [*left, *(f"{name}: the model reads its weight without calling it" for name in behind)]
    cells = (
        family,
        f"{report.share:.1%}",
        f"{report.flops_share:.0%}",
        ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        ", ".join(notes),
    )
    return f"| {' | '.join(cells)} |"


def written(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rule = "|---|---:|---:|---|---|"
    table = [f"| {' | '.join(HEADER)} |", rule, *map(line, sorted(FAMILIES))]
    return "\n".join([before + BEGIN, "", *table, "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
