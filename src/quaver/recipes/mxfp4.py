"""OCP microscaling in four bits: 32 elements along k share a power of two, stored in one byte.

torch and XLA multiply NVFP4 natively and not this, so it is computed by emulation.

Source: OCP Microscaling Formats 1.0; scales are rounded up so that nothing saturates, as in `mxfp8`. The idea to round
gradients at random and to rotate the operands of backward is Tseng et al.'s, "Training LLMs with MXFP4",
arXiv:2502.20586.
"""

from dataclasses import replace

from quaver.core.numbers.formats import E2M1
from quaver.core.recipe_functions import attention_spec, flags, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe
from quaver.recipes.mxfp8 import LINE as MXFP8_LINE


@recipe
def mxfp4(*, stochastic_rounding: bool = False, hadamard: bool = False, attention: bool = False) -> Recipe:
    """E2M1 everywhere, E8M0 scales in 1×32 blocks.

    Args:
        stochastic_rounding: round grad_output at random, so that its mean survives.
        hadamard: rotate groups of 16 along k of all operands of dgrad and wgrad, which spreads outliers.
        attention: quantize attention too, in eight bits as `mxfp8` does it.
    """
    flags(stochastic_rounding=stochastic_rounding, hadamard=hadamard)
    line = QuantSpec(E2M1, (1, 32), "e8m0")
    rotated = replace(line, hadamard=hadamard)
    gradient = replace(rotated, rounding="stochastic" if stochastic_rounding else "nearest")
    fprop, backward = GemmSpec(line, line), GemmSpec(gradient, rotated)
    return Recipe("mxfp4", fprop, backward, backward, attention=attention_spec(attention, MXFP8_LINE, MXFP8_LINE))
