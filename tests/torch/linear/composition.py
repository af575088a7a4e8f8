"""Linear layer under a recipe, written from the numpy reference, for comparison with the fast one."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quaver import reference
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.linear.linear import Linear
from quaver.torch.state.noise import tensor_id


@dataclass
class Composed:
    """float64 results of the three GEMMs and the bias gradient."""

    output: np.ndarray
    grad_input: np.ndarray
    grad_weight: np.ndarray
    grad_bias: np.ndarray


def compose(
    layer: Linear,
    recipe: Recipe,
    x: Tensor,
    g: Tensor,
    *,
    factors: tuple[float, float, float] = (0.0, 0.0, 0.0),
    count: int = 0,
) -> Composed:
    """Forward and backward of input [..., K] and grad_output [..., N].

    Args:
        layer: provides the weight, bias and noise.
        recipe: how the six operands are quantized, each from high precision.
        x: input.
        g: gradient of the output.
        factors: delayed scaling's encode factors of input, weight and grad_output; 0 is unset.
        count: how often grad_output was quantized before.
    """
    a, w, b = array(x).reshape(-1, x.shape[-1]), array(layer.weight), None if layer.bias is None else array(layer.bias)
    gradient = array(g).reshape(-1, g.shape[-1])

    def quantized(t: np.ndarray, spec: QuantSpec | None, column: int, operand: str) -> np.ndarray | reference.Quantized:
        if spec is None:
            return t
        noise = {"seed": layer.seed, "tensor_id": tensor_id(layer, operand), "count": count}
        factor = factors[column] if recipe.delayed is not None else None
        return reference.quantize(t, spec, factor=factor, **(noise if spec.rounding == "stochastic" else {}))

    def values(q: np.ndarray | reference.Quantized, dtype: torch.dtype) -> np.ndarray:
        assert isinstance(q, reference.Quantized)
        return array(torch.from_numpy(q.dequantize()).to(dtype))

    with np.errstate(invalid="ignore", over="ignore"):
        aq, wq = quantized(a, recipe.fprop.a, 0, "input"), quantized(w, recipe.fprop.b, 1, "weight")
        at, wt = quantized(a.T, recipe.wgrad.b, 0, "input.T"), quantized(w.T, recipe.dgrad.b, 1, "weight.T")
        if recipe.dequantized_backward:
            at = values(aq, x.dtype).T if recipe.wgrad.b is None else at
            wt = values(wq, x.dtype).T if recipe.dgrad.b is None else wt
        return Composed(
            reference.matmul(aq, wq, b).reshape(*x.shape[:-1], -1),
            reference.matmul(quantized(gradient, recipe.dgrad.a, 2, "grad_output"), wt).reshape(x.shape),
            reference.matmul(quantized(gradient.T, recipe.wgrad.a, 2, "grad_output.T"), at),
            gradient.astype(np.float64).sum(0),
        )


def array(t: Tensor) -> np.ndarray:
    """float32 numpy."""
    return t.detach().to(torch.float32).numpy()
