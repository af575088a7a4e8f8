"""Which implementation runs for each GEMM and each quantization of a layer, and why the others do not."""

from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from quaver.core.plan import plan
from quaver.core.spec import QuantSpec, Recipe
from quaver.torch import ops
from quaver.torch.autocast import recipe_in_force
from quaver.torch.linear import Linear
from quaver.torch.quantized import STORAGE, Quantized


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
            lines.append(f"  {row.what:<20}{row.how:<58}{row.runs}")
            lines += [f"{'':<22}not {name}: {why}" for name, why in row.passed_over]
        return "\n".join(lines)


OPERANDS = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight.T"),
    "wgrad": ("grad_output.T", "input.T"),
}
UNQUANTIZED = "high precision"


def explain(layer: Linear, x: Tensor) -> Explanation:
    """Say, and print, what a forward and backward of this layer on x would run.

    Args:
        layer: a `quaver.torch.Linear`.
        x: an input [..., in_features]; only its dtype, shape and device matter.
    Raises:
        ValueError: the layer is not quantized.
    """
    if not isinstance(layer, Linear):
        raise ValueError(f"explain takes a quaver.torch.Linear, not {type(layer).__name__}; convert the model first")
    recipe = recipe_in_force(layer.recipe)
    rows: list[Row] = []
    if recipe is not None:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        operands = _operands(layer, x, dtype)
        for name in OPERANDS:
            rows += _gemm(name, recipe, operands, _weight_dtype(layer) if name == "wgrad" else dtype, layer.weight_spec)
    found = Explanation(recipe, tuple(rows))
    print(found)
    return found


def _operands(layer: Linear, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of the six operands' shapes [rows, k]; their values are not looked at."""
    flat = torch.empty((x.numel() // max(x.shape[-1], 1), layer.in_features), dtype=dtype, device=x.device)
    g = flat.new_empty((flat.shape[0], layer.out_features))
    w = flat.new_empty((layer.out_features, layer.in_features), dtype=_weight_dtype(layer))
    straight = {"input": flat, "weight": w, "grad_output": g}
    return straight | {f"{name}.T": t.t() for name, t in straight.items()}


def _weight_dtype(layer: Linear) -> torch.dtype:
    """What the weight is quantized from and its gradient is in; a weight that is codes is dequantized to float32."""
    return layer.weight.dtype if layer.weight_spec is None else torch.float32


def _gemm(
    name: str, recipe: Recipe, operands: dict[str, Tensor], dtype: torch.dtype, kept: QuantSpec | None
) -> list[Row]:
    """A row for each operand of a GEMM, and one for itself; `kept` is how the weight exists only."""
    spec = recipe.gemms[name]
    a, b = (operands[operand] for operand in OPERANDS[name])
    if spec.a is None or spec.b is None or a.dtype not in ops.DTYPES:
        return [Row(what, UNQUANTIZED, "torch") for what in (*OPERANDS[name], f"{name} GEMM")]
    rows = []
    for operand, x, quant in zip(OPERANDS[name], (a, b), (spec.a, spec.b), strict=True):
        shared = operand.removesuffix(".T") if _reused(operand, recipe) else ""
        if kept == quant and (operand == "weight" or shared == "weight"):
            rows.append(Row(operand, f"{quant}, the codes of the parameter", "nothing"))
            continue
        how = f"{quant}, the codes of {shared}" if shared else str(quant)
        rows.append(_row(operand, how, ops.QUANTIZE.explain(x, quant)))
    how = "float32 accumulation" + (", fast where the hardware offers it" if spec.fast_accum else "")
    return [*rows, _row(f"{name} GEMM", how, ops.MATMUL.explain(_hollow(a, spec.a), _hollow(b, spec.b), dtype, None))]


def _reused(operand: str, recipe: Recipe) -> bool:
    """Whether the transpose of what an earlier GEMM quantized serves."""
    reuse = plan(recipe)
    return {"weight.T": reuse.weight, "grad_output.T": reuse.grad_output, "input.T": reuse.input}.get(operand, False)


def _hollow(x: Tensor, spec: QuantSpec) -> Quantized:
    """A quantized operand of the right kind and shape with nothing in it: implementations are asked, not run."""
    rows, k = x.shape[0], spec.padded(x.shape[1])
    data = torch.empty((rows, k if spec.format.bits == 8 else (k + 1) // 2), device=x.device, dtype=torch.uint8)
    narrow = spec.scale == "e8m0" or spec.two_level
    scale = data.new_empty(spec.blocks(rows, k), dtype=torch.uint8 if narrow else torch.float32)
    one = scale.new_ones((1, 1), dtype=torch.float32) if spec.two_level else None
    on_host = spec.per_tensor and x.is_cpu
    return Quantized(data.view(STORAGE[spec.format.name]), 1.0 if on_host else scale, spec, (rows, k), False, one)


def _row(what: str, how: str, reasons: list[tuple[str, str]]) -> Row:
    """The first implementation without a reason against it, and those passed over on the way there."""
    passed_over = tuple(takewhile(lambda reason: reason[1], reasons))
    runs = reasons[len(passed_over)][0] if len(passed_over) < len(reasons) else "nothing"
    return Row(what, how, runs, passed_over)
