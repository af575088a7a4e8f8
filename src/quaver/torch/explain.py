"""Which implementation runs for each GEMM and each quantization of a layer, and why the others do not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quaver.core.spec import Recipe
from quaver.torch import ops
from quaver.torch.autocast import recipe_in_force
from quaver.torch.linear import Linear


@dataclass(frozen=True)
class Row:
    """One quantization or GEMM."""

    what: str
    #: The spec, or how the GEMM accumulates.
    how: str
    #: The implementation that runs.
    runs: str
    #: (implementation, why not) of those before it.
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; printing it shows a table."""

    recipe: Recipe | None
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        if self.recipe is None:
            return "no recipe is in force: nn.Linear's own GEMMs, unquantized"
        lines = [f"recipe {self.recipe}"]
        for row in self.rows:
            lines.append(f"  {row.what:<20}{row.how:<44}{row.runs}")
            lines += [f"{'':<22}not {name}: {why}" for name, why in row.passed_over]
        return "\n".join(lines)


OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight.T"),
    "wgrad": ("grad_output.T", "input.T"),
}


def explain(layer: Linear, x: Tensor) -> Explanation:
    """Say, and print, what a forward and backward of this layer on x would run.

    Args:
        layer: a `quaver.torch.Linear`.
        x: an input [..., in_features]; only its dtype, shape and device matter.
    """
    if not isinstance(layer, Linear):
        raise ValueError(f"explain takes a quaver.torch.Linear, not {type(layer).__name__}; convert the model first")
    recipe = recipe_in_force(layer.recipe)
    rows = () if recipe is None else tuple(row for name in OPERANDS for row in _gemm(name, recipe, layer, x))
    found = Explanation(recipe, rows)
    print(found)
    return found


def _gemm(name: str, recipe: Recipe, layer: Linear, x: Tensor) -> list[Row]:
    spec = recipe.gemms[name]
    if spec.a is None or spec.b is None:
        return [Row(f"{name} GEMM", "unquantized", "torch")]
    x2 = x.detach().reshape(-1, x.shape[-1])
    g = x2.new_empty((x2.shape[0], layer.out_features))
    w = layer.weight.detach()
    tensors = {"input": x2, "weight": w, "grad_output": g, "weight.T": w.t(), "grad_output.T": g.t(), "input.T": x2.t()}
    rows = []
    for operand, quant in zip(OPERANDS[name], (spec.a, spec.b), strict=True):
        rows.append(_row(operand, str(quant), ops.QUANTIZE.explain(tensors[operand], quant)))
    few = [ops.run_quantize(torch.zeros((1, 1), device=x.device), s) for s in (spec.a, spec.b)]
    how = "float32 accumulation" + (", fast where the hardware offers it" if spec.fast_accum else "")
    return [*rows, _row(f"{name} GEMM", how, ops.MATMUL.explain(*few, x.dtype, None))]


def _row(what: str, how: str, reasons: list[tuple[str, str]]) -> Row:
    runs = next((name for name, why in reasons if not why), "nothing")
    before = [name for name, _ in reasons].index(runs) if runs != "nothing" else len(reasons)
    return Row(what, how, runs, tuple(reasons[:before]))
