"""OCP microscaling in six bits: 32 elements along k share a power of two, stored in one byte.

No GEMM that torch or XLA offers takes six bits, so this recipe is computed by emulation: a code is stored in a byte.

Source: OCP Microscaling Formats 1.0; Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv:2310.10537,
which trains in E3M2. Scales are rounded up so that nothing saturates, as in `mxfp8`.
"""

from quaver.core.numbers.formats import E2M3, E3M2
from quaver.core.recipe_functions import attention_spec, recipe
from quaver.core.spec import GemmSpec, QuantSpec, Recipe
from quaver.recipes.mxfp8 import LINE as MXFP8_LINE

#: By option: the format of input and weight, and that of gradients.
FORMATS = {"hybrid": (E2M3, E3M2), "e2m3": (E2M3, E2M3), "e3m2": (E3M2, E3M2)}


@recipe
def mxfp6(*, format: str = "hybrid", attention: bool = False) -> Recipe:
    """E2M3 with E3M2 gradients, E8M0 scales in 1×32 blocks.

    Args:
        format: "hybrid" (gradients in E3M2, the rest in E2M3), or "e2m3" or "e3m2" for all.
        attention: quantize attention too, in eight bits as `mxfp8` does it.
    """
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format is {format!r}; give 'hybrid' (gradients in E3M2, the rest in E2M3), 'e2m3' or 'e3m2'")
    value, gradient = (QuantSpec(fmt, (1, 32), "e8m0") for fmt in FORMATS[format])
    fprop, backward = GemmSpec(value, value), GemmSpec(gradient, value)
    return Recipe("mxfp6", fprop, backward, backward, attention=attention_spec(attention, MXFP8_LINE, MXFP8_LINE))
