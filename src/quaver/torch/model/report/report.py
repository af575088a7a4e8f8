"""The report of `convert` for torch: a row for each layer, its shares of parameters and FLOPs, and a check by a run."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quaver.core.converting import conversion
from quaver.core.costs.ledger import saved_bytes
from quaver.core.spec import Recipe
from quaver.core.text.tables import html_table
from quaver.torch.model.fusing.placing import Placed
from quaver.torch.model.report.checking import Check, checked
from quaver.torch.model.report.explanation import fprop_runs

#: Tokens of the input that the bytes are counted for.
TOKENS = 4096
HEADER = ("layer", "recipe", "implementation", "parameters", "FLOPs", "bytes saved a token", "left alone because")


@dataclass(frozen=True)
class Row:
    """A module that multiplies by a weight."""

    name: str
    kind: str
    #: None where it was left alone.
    recipe: Recipe | None
    #: Which implementation runs fprop's GEMM on the weights' device; "" where it was left alone.
    implementation: str
    parameters: int
    #: FLOPs of its forward for one token of the model.
    flops: float
    #: Bytes a token that backward keeps less than in high precision, as if no other layer read the same input.
    saved: float
    #: Why it was left alone, or "".
    why: str = ""


@dataclass(repr=False)
class Report(conversion.Report):
    """What `convert` did, and why it left the rest alone."""

    rows: list[Row] = field(default_factory=list)
    #: Of `blocks=`: each module that one of our blocks may compute, what computes it, and why its own forward does.
    blocks: list[Placed] = field(default_factory=list)

    @property
    def flops_share(self) -> float:
        """The converted part of the FLOPs of all GEMMs of a token, the output head's included."""
        return self._part(lambda row: row.flops)

    @property
    def saved(self) -> float:
        """Bytes a token that backward keeps less, where no two layers share an input."""
        return sum(row.saved for row in self.rows)

    def table(self) -> str:
        """A line for each kind of layer: those that differ in numbers of their names alone share it."""
        lines = [HEADER, *(_cells(row, self, count) for row, count in _alike(self.rows))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def check(self, model: nn.Module, *inputs: Any, **named: Any) -> Check:
        """Run a model once, without gradients, and see whether what was converted is what computes.

        Args:
            model: the converted model, or one that wraps it.
            inputs, named: what its forward takes.
        Returns:
            The layers that were converted and not called, those whose weight something else read, and those that are no
            longer in the model, as another library's conversion leaves them. Noise and buffers are as before the run.
        """
        return checked({row.name: row.kind for row in self.rows if row.recipe is not None}, model, inputs, named)

    def _part(self, of: Callable[[Row], float]) -> float:
        total = sum(map(of, self.rows))
        return sum(of(row) for row in self.rows if row.recipe is not None) / total if total else 0.0

    def _done(self) -> list[str]:
        lines = super()._done()
        if any(row.recipe is not None for row in self.rows):
            lines.append(
                f"  {self.flops_share:.0%} of the FLOPs of GEMMs; backward keeps {self.saved:,.0f} bytes a token less"
            )
        placed = Counter((row.kind, row.block, row.why) for row in self.blocks)
        for (kind, block, why), count in placed.items():
            reason = f" ({why})" if why else ""
            lines.append(f"  {count} {kind}: {f'computed as {block}' if block else 'computed by itself'}{reason}")
        return lines

    def _repr_html_(self) -> str:
        table = html_table(HEADER, [_cells(row, self, count) for row, count in _alike(self.rows)])
        return f"{super()._repr_html_()}<details><summary>kinds of layers</summary>{table}</details>"


def _cells(row: Row, report: Report, count: int) -> tuple[str, ...]:
    parameters, flops = (sum(map(of, report.rows)) or 1 for of in (lambda r: r.parameters, lambda r: r.flops))
    return (
        (row.name or "(root)") + (f" x {count}" if count > 1 else ""),
        "" if row.recipe is None else str(row.recipe),
        row.implementation,
        f"{count * row.parameters / parameters:.1%}",
        f"{count * row.flops / flops:.1%}",
        f"{count * row.saved:,.0f}" if row.recipe is not None else "",
        row.why,
    )


def _alike(rows: list[Row]) -> list[tuple[Row, int]]:
    """One of the rows whose names differ in numbers alone, and how many there are."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)
        groups.setdefault((name, *list(vars(row).values())[1:]), []).append(row)
    return [
        (Row(key[0], *list(vars(same[0]).values())[1:]) if len(same) > 1 else same[0], len(same))
        for key, same in groups.items()
    ]


class Implementations:
    """Which implementation runs fprop's GEMM of each shape; asked once for each, by the name that `explain` gives."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def __call__(self, recipe: Recipe, weight: torch.Tensor, features: tuple[int, int]) -> str:
        if weight.is_meta:
            return "not on a device yet"
        key = recipe, weight.device, weight.dtype, features
        if key not in self._known:
            self._known[key] = fprop_runs(recipe, *features, weight.dtype, weight.device)
        return self._known[key]


def saved_a_token(recipe: Recipe, features: int, itemsize: int) -> float:
    """Bytes of one token's input [features] that backward keeps less than in high precision."""
    return itemsize * features - saved_bytes(recipe, TOKENS, features, itemsize) / TOKENS
