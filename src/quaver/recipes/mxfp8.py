"""OCP microscaling: 32 elements along k share a power of two, stored in one byte.

Source: OCP Microscaling Formats 1.0; scales are rounded up so that nothing saturates (NVIDIA, arXiv:2506.08027).
"""

from quaver.core.numbers.formats import E4M3
from quaver.core.recipe_functions import attention_spec, flags, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe

#: 32 elements along k share an exponent byte.
LINE = QuantSpec(E4M3, (1, 32), "e8m0")


@recipe
def mxfp8(*, weight_2d: bool = False, attention: bool = False) -> Recipe:
    """E4M3 everywhere, E8M0 scales in 1×32 blocks.

    Args:
        weight_2d: scale weights in 32×32 blocks, so that one copy serves fprop and dgrad.
        attention: quantize attention too, in 1×32 blocks along the axis that is summed.
    """
    flags(weight_2d=weight_2d)
    weight = QuantSpec(E4M3, (32, 32), "e8m0") if weight_2d else LINE
    fprop, wgrad = GemmSpec(LINE, weight), GemmSpec(LINE, LINE)
    return Recipe("mxfp8", fprop, fprop, wgrad, attention=attention_spec(attention, LINE, LINE))
