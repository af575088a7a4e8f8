"""Scales for 1×128 of the activations and gradients and 128×128 of the weights.

Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.
"""

from quaver.core.numbers.formats import E4M3
from quaver.core.recipe_functions import attention_spec, float32_scale, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe


@recipe
def blockwise(*, power_of_two: bool = True, attention: bool = False) -> Recipe:
    """E4M3 everywhere; 1×128 blocks, 128×128 for weights, whose transpose is reused.

    Args:
        power_of_two: False scales by 448 / amax.
        attention: quantize attention too, q, k, v and the gradients in 1×128 blocks along the axis that is summed.
    """
    kind = float32_scale(power_of_two)
    line = QuantSpec(E4M3, (1, 128), kind)
    square = QuantSpec(E4M3, (128, 128), kind)
    fprop, wgrad = GemmSpec(line, square), GemmSpec(line, line)
    return Recipe("blockwise", fprop, fprop, wgrad, attention=attention_spec(attention, line, line))
