"""GEMMs that backward runs when the weight, or the input, needs no gradient."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure, exactly
from benchmarks.subjects import linears, peer
from quaver.recipes import RECIPES

FEATURES = 256
#: Operators that multiply matrices, by name.
GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mkldnn_linear", "linear", "matmul"}
#: Column, and whether weight and input need gradients.
COLUMNS = (("frozen weight", False, True), ("frozen input", True, False), ("nothing frozen", True, True))


class CountGemms(TorchDispatchMode):
    """Counts the matrix products that torch runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.partition("::")[2] in GEMMS
        return func(*args, **(kwargs or {}))


def backward_gemms(layer: nn.Module, recipe: str | None, *, weight: bool, input: bool) -> int:
    """Return the number of GEMMs of a backward, by whether weight and input need gradients."""
    x = torch.randn(FEATURES, FEATURES, dtype=torch.bfloat16, requires_grad=input)
    layer.weight.requires_grad_(weight)
    if recipe is None:
        y = layer(x)
    else:
        with qt.autocast(recipe):
            y = layer(x)
    with CountGemms() as gemms:
        y.backward(torch.randn_like(y))
    return gemms.count


def measure(quick: bool) -> list[Figure]:
    base = linears.linear(FEATURES, torch.bfloat16)
    subjects: list[tuple[str, nn.Module, str | None]] = [("nn.Linear", base, None)]
    subjects += [(f"torchao {recipe}", linears.torchao(base, recipe), None) for recipe in peer.RECIPES]
    subjects += [(f"quaver {recipe}", linears.ours(base), recipe) for recipe in RECIPES]
    figures = []
    for subject, layer, recipe in subjects:
        for column, weight, input in COLUMNS:
            count = backward_gemms(layer, recipe, weight=weight, input=input)
            target = exactly(2 if weight and input else 1) if subject.startswith("quaver") else None
            figures.append(Figure(subject, column, count, "GEMMs", target))
    return figures


CASE = Case(
    name="frozen",
    title="GEMMs of one backward with something frozen",
    notes="Matrix products that torch dispatches during backward, of whatever kind.",
    measure=measure,
)
