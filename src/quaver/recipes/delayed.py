"""One scale a tensor, taken from the amaxes of earlier steps (delayed scaling).

Source: Micikevicius et al. 2022, arXiv:2209.05433; the window and its rules are Transformer Engine's.
"""

from typing import Literal

from quaver.core.recipe_functions import attention_spec, recipe
from quaver.core.spec import Delayed, Recipe
from quaver.recipes.tensorwise import per_tensor_gemms


@recipe
def delayed(
    *,
    margin: int = 0,
    history: int = 1024,
    algorithm: Literal["max", "most_recent"] = "max",
    format: str = "hybrid",
    power_of_two: bool = True,
    fast_accum: bool = True,
    attention: bool = False,
) -> Recipe:
    """E4M3 with E5M2 gradients, scaled by the largest amax of the last `history` steps.

    Args:
        margin: halve the encode factor this many times, as room for growth.
        history: steps of amax that are kept.
        algorithm: "max" of the window or its "most_recent" value.
        format: "hybrid" (gradients in E5M2) or "e4m3" (gradients in E4M3 too).
        power_of_two: False scales by format.max / amax.
        fast_accum: let fprop accumulate faster where the hardware offers it.
        attention: quantize attention too; it keeps no history: each operand of each head is scaled by its own amax.
    """
    state = Delayed(length=history, margin=margin, algorithm=algorithm)
    fprop, dgrad, wgrad = per_tensor_gemms(format, power_of_two, fast_accum)
    quantized_attention = attention_spec(attention, fprop.a, dgrad.a)
    return Recipe("delayed", fprop, dgrad, wgrad, delayed=state, attention=quantized_attention)
