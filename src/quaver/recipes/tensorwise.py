"""One scale a tensor, measured as the tensor comes (current scaling)."""

from quaver.core.numbers.formats import E4M3, E5M2
from quaver.core.recipe_functions import attention_spec, flags, float32_scale, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe


def per_tensor_gemms(format: str, power_of_two: bool, fast_accum: bool) -> tuple[GemmSpec, GemmSpec, GemmSpec]:
    """fprop, dgrad and wgrad with one scale a tensor, gradients in E5M2 (hybrid) or E4M3."""
    if format not in ("hybrid", "e4m3"):
        raise ValueError(f"format is {format!r}; give 'hybrid' (gradients in E5M2) or 'e4m3' (everything in E4M3)")
    scale = float32_scale(power_of_two)
    flags(fast_accum=fast_accum)
    value = QuantSpec(E4M3, scale=scale)
    gradient = QuantSpec(E5M2 if format == "hybrid" else E4M3, scale=scale)
    return GemmSpec(value, value, fast_accum), GemmSpec(gradient, value), GemmSpec(gradient, value)


@recipe
def tensorwise(
    *, format: str = "hybrid", power_of_two: bool = True, fast_accum: bool = True, attention: bool = False
) -> Recipe:
    """E4M3 with E5M2 gradients, one power-of-two scale a tensor.

    Args:
        format: "hybrid" (gradients in E5M2) or "e4m3" (gradients in E4M3 too).
        power_of_two: False scales by format.max / amax, as Transformer Engine and torchao do by default.
        fast_accum: let fprop accumulate faster where the hardware offers it.
        attention: quantize attention too, with one scale for each operand of each head.
    """
    fprop, dgrad, wgrad = per_tensor_gemms(format, power_of_two, fast_accum)
    return Recipe("tensorwise", fprop, dgrad, wgrad, attention=attention_spec(attention, fprop.a, dgrad.a))
