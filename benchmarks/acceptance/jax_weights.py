"""What a run of `accept --framework jax` quantized."""

import numpy as np
from jax import Array

from quaver import Recipe
from quaver.jax import quantize
from quaver.recipes.spec import QuantSpec
from quaver.train import TrainResult


def weight_errors(done: TrainResult, recipe: Recipe) -> dict[str, float]:
    """The quantization error of every converted layer's weight.

    Raises: RuntimeError if another layer than embedding and head was left alone, or a converted layer loses nothing.
    """
    params = done.model.params
    matrices = [name.removesuffix(".weight") for name, parameter in params.items() if parameter.ndim == 2]
    left = [name for name in matrices if name not in done.conversion.converted]
    if left != ["embedding", "head"] or done.model.decoder.recipe != recipe:
        raise RuntimeError(f"left in high precision: {left}; only embedding and head should be")
    spec = recipe.fprop.b
    if spec is None:
        return {}
    return {name: relative_rms(params[f"{name}.weight"], spec) for name in done.conversion.converted}


def relative_rms(weight: Array, spec: QuantSpec) -> float:
    wide = np.asarray(weight, np.float64)
    difference = np.asarray(quantize(weight, spec).dequantize(), np.float64) - wide
    return float(np.sqrt(np.square(difference).mean() / np.square(wide).mean()))
