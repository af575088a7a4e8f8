"""Which quantized operand of one GEMM serves another: the whole logic of what a layer keeps and what it quantizes again."""

from dataclasses import dataclass
from functools import cache

from quaver.core.spec import QuantSpec, Recipe


def reusable(have: QuantSpec | None, want: QuantSpec | None) -> bool:
    """Whether an operand quantized by `have` is, transposed, exactly what `want` asks for."""
    return have is not None and have == want and have.transposable


@dataclass(frozen=True)
class Plan:
    """What may be reused under a recipe."""

    #: fprop's input serves wgrad: its codes are what backward keeps.
    input: bool
    #: fprop's weight serves dgrad.
    weight: bool
    #: dgrad's grad_output serves wgrad.
    grad_output: bool


@cache
def plan(recipe: Recipe) -> Plan:
    return Plan(
        input=reusable(recipe.fprop.a, recipe.wgrad.b),
        weight=reusable(recipe.fprop.b, recipe.dgrad.b),
        grad_output=reusable(recipe.dgrad.a, recipe.wgrad.a),
    )


def saved_bytes(recipe: Recipe, tokens: int, features: int, itemsize: int = 2) -> int:
    """Bytes of input that a layer keeps for backward.

    Args:
        recipe: of the layer.
        tokens: rows of the input.
        features: columns of the input.
        itemsize: bytes of one unquantized element.
    """
    spec = recipe.wgrad.b
    if spec is None:
        return tokens * features * itemsize
    k = spec.padded(tokens)
    rows, columns = spec.blocks(features, k)
    scale = 4 if spec.scale in ("fp32", "power_of_two") else 1
    return features * k * spec.format.bits // 8 + rows * columns * scale
