"""No quantization at all: the baseline that every other recipe is compared with."""

from quaver.core.recipe_functions import recipe
from quaver.core.spec import GemmSpec, Recipe


@recipe
def bf16() -> Recipe:
    """Every GEMM in the precision of its operands."""
    high = GemmSpec(None, None)
    return Recipe("bf16", high, high, high)
