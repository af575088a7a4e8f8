"""Four bits: E2M1 with an E4M3 scale for 16 elements and one factor for the tensor.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

from quaver.core.numbers.formats import E2M1
from quaver.core.recipe_functions import attention_spec, flags, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe, ScaleKind
from quaver.recipes.mxfp8 import LINE as MXFP8_LINE


@recipe
def nvfp4(
    *,
    stochastic_rounding: bool = True,
    hadamard: bool = True,
    weight_2d: bool = True,
    power_of_two: bool = True,
    attention: bool = False,
) -> Recipe:
    """E2M1 everywhere; 1×16 blocks, 16×16 for weights; stochastic gradients; both wgrad operands rotated.

    Args:
        stochastic_rounding: round grad_output at random, so that its mean survives.
        hadamard: rotate groups of 16 tokens of both wgrad operands, which spreads outliers.
        weight_2d: scale weights in 16×16 blocks, so that forward and backward see the same weight.
        power_of_two: False takes 2688 / amax as the tensor's factor, as Transformer Engine does.
        attention: quantize attention too, in eight bits as `mxfp8` does it: E4M3 in 1×32 blocks, rounded to nearest.
            Four bits, noise and rotation stay with the linear layers.
    """
    flags(stochastic_rounding=stochastic_rounding, hadamard=hadamard, weight_2d=weight_2d, power_of_two=power_of_two)
    kind: ScaleKind = "two_level" if power_of_two else "two_level_fp32"
    line = QuantSpec(E2M1, (1, 16), kind)
    weight = QuantSpec(E2M1, (16, 16), kind) if weight_2d else line
    gradient = QuantSpec(E2M1, (1, 16), kind, "stochastic" if stochastic_rounding else "nearest")
    rotated = QuantSpec(E2M1, (1, 16), kind, "nearest", hadamard)
    rotated_gradient = QuantSpec(E2M1, (1, 16), kind, gradient.rounding, hadamard)
    fprop, dgrad, wgrad = GemmSpec(line, weight), GemmSpec(gradient, weight), GemmSpec(rotated_gradient, rotated)
    quantized_attention = attention_spec(attention, MXFP8_LINE, MXFP8_LINE)
    return Recipe("nvfp4", fprop, dgrad, wgrad, attention=quantized_attention)
