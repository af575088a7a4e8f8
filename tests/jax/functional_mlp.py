"""The MLP of a Transformer as functions of arrays, made of the same functions as the modules of linen and NNX."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from quaver.jax.blocks.layers import activate_fused, normalize
from quaver.jax.linears.dot_general import dense
from quaver.recipes.spec import Recipe

State = Mapping[str, Mapping[str, Array]]


def mlp(
    x: Array,
    wi: Array,
    wo: Array,
    bi: Array | None = None,
    bo: Array | None = None,
    *,
    activation: str = "gelu",
    recipe: str | Recipe | None = None,
    state: State | None = None,
    name: str = "mlp",
    **options: Any,
) -> Array:
    """wo · activation(wi · x + bi) + bo, of wi [d, hidden], or [d, hidden, 2] for a gated activation."""
    state = state or {}
    name = f"{name}." if name else ""
    h = dense(x, wi, bi, recipe=recipe, state=state.get("wi"), name=f"{name}wi")
    h = activate_fused(activation, h, wi.ndim - 1, **options)
    return dense(h, wo, bo, recipe=recipe, state=state.get("wo"), name=f"{name}wo")


def layer_norm_mlp(
    x: Array,
    scale: Array | None,
    shift: Array | None,
    wi: Array,
    wo: Array,
    bi: Array | None = None,
    bo: Array | None = None,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-6,
    zero_centered: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """`mlp` of the normalized x, and the normalized x."""
    normalized = normalize(x, scale, shift, normalization=normalization, eps=eps, zero_centered=zero_centered)
    return mlp(normalized, wi, wo, bi, bo, **options), normalized
