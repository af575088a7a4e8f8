"""Linear layer under a recipe, written from the numpy reference, for comparison with the JAX layer."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from quaver import reference
from quaver.recipes.spec import QuantSpec, Recipe


@dataclass
class Composed:
    """float64 results of the three GEMMs and of the bias gradient, and the operands that went into them."""

    output: np.ndarray
    grad_x: np.ndarray
    grad_w: np.ndarray
    grad_bias: np.ndarray
    operands: dict[str, Any]


def compose(
    recipe: Recipe,
    x: Any,
    w: Any,
    bias: Any,
    g: Any,
    *,
    factors: Any = (0.0, 0.0, 0.0),
    counts: tuple[int, int] = (0, 0),
    name: str = "linear",
    seed: int = 0,
) -> Composed:
    """Forward and backward of x [..., K], w [K, N] and grad_output [..., N].

    Args:
        factors: delayed scaling's encode factors of input, weight and grad_output; 0 is unset.
        counts: how often grad_output and its transpose were quantized before.
    """
    shape = np.shape(x)
    x, w, g = (np.asarray(a, np.float32) for a in (x, w, g))
    a, weight, gradient = x.reshape(-1, shape[-1]), np.ascontiguousarray(w.T), g.reshape(-1, g.shape[-1])

    def quantized(t: np.ndarray, spec: QuantSpec | None, column: int, operand: str) -> Any:
        if spec is None:
            return t
        stream = {"seed": seed, "tensor_id": zlib.crc32(f"{name}.{operand}".encode())}
        stream["count"] = counts[operand.endswith(".T")]
        factor = float(factors[column]) if recipe.delayed is not None else None
        return reference.quantize(t, spec, factor=factor, **(stream if spec.rounding == "stochastic" else {}))

    with np.errstate(invalid="ignore", over="ignore"):
        operands = {
            "input": quantized(a, recipe.fprop.a, 0, "input"),
            "weight": quantized(weight, recipe.fprop.b, 1, "weight"),
            "grad_output": quantized(gradient, recipe.dgrad.a, 2, "grad_output"),
            "weight.T": quantized(w, recipe.dgrad.b, 1, "weight.T"),
            "grad_output.T": quantized(gradient.T, recipe.wgrad.a, 2, "grad_output.T"),
            "input.T": quantized(a.T, recipe.wgrad.b, 0, "input.T"),
        }
        return Composed(
            reference.matmul(operands["input"], operands["weight"], bias).reshape(g.shape),
            reference.matmul(operands["grad_output"], operands["weight.T"]).reshape(shape),
            reference.matmul(operands["input.T"], operands["grad_output.T"]),
            gradient.astype(np.float64).sum(0),
            operands,
        )
