"""One scale a row of each operand, so that a huge token or channel spoils only itself.

Source: torchao.float8's recipes "rowwise" and "rowwise_with_gw_hp" (github.com/pytorch/ao).
"""

from dataclasses import replace

from quaver.core.numbers.formats import E4M3
from quaver.core.recipe_functions import attention_spec, flags, float32_scale, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe


@recipe
def rowwise(*, power_of_two: bool = True, fast_accum: bool = True, attention: bool = False) -> Recipe:
    """E4M3 everywhere, a scale for each row along the axis that the GEMM sums over.

    Args:
        power_of_two: False scales by 448 / amax.
        fast_accum: let fprop accumulate faster where the hardware offers it.
        attention: quantize attention too, with a scale for each row of each operand.
    """
    row = QuantSpec(E4M3, (1, None), float32_scale(power_of_two))
    flags(fast_accum=fast_accum)
    plain = GemmSpec(row, row)
    fprop = GemmSpec(row, row, fast_accum)
    return Recipe("rowwise", fprop, plain, plain, attention=attention_spec(attention, row, row))


@recipe
def rowwise_bf16_wgrad(*, power_of_two: bool = True, fast_accum: bool = True, attention: bool = False) -> Recipe:
    """As `rowwise`, with the weight per tensor in dgrad and the whole weight gradient in high precision.

    Args:
        power_of_two: False scales by 448 / amax.
        fast_accum: let fprop accumulate faster where the hardware offers it.
        attention: quantize attention too, with a scale for each row of each operand.
    """
    whole = rowwise(power_of_two=power_of_two, fast_accum=fast_accum, attention=attention)
    dgrad = GemmSpec(whole.dgrad.a, QuantSpec(E4M3, scale=float32_scale(power_of_two)))
    return replace(whole, name="rowwise_bf16_wgrad", dgrad=dgrad, wgrad=GemmSpec(None, None))
