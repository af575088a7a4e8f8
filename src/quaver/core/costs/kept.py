"""What a layer keeps for backward under a recipe, and what that costs; the reuse itself is `Recipe.plan`."""

from quaver.core.spec import Plan, Recipe, reusable

__all__ = ["Plan", "plan", "reusable", "saved_bytes"]


def plan(recipe: Recipe) -> Plan:
    """Which quantized operands of one GEMM serve another."""
    return recipe.plan


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
    return features * k * spec.format.stored_bits // 8 + rows * columns * scale
