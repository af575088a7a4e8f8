"""Transformer Engine's contexts for JAX, implemented by `quaver.jax.autocast`, and its functions for collections."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.compat.transformer_engine.jax.sharding import MeshResource, check_unsharded
from quaver.jax.linen.dense import COLLECTION
from quaver.jax.state.context import autocast as _autocast

#: Collection whose gradient is its next value.
NVTE_FP8_COLLECTION_NAME = COLLECTION
#: Collection in Transformer Engine's own checkpoints.
THEIRS = "fp8_metas"
#: Operands with state in Transformer Engine, in Quaver's order.
OPERANDS = "x", "kernel", "grad"
#: By Transformer Engine's suffix, the layer of an MLP and the suffix of its gradient. Suffixes of gradients are swapped
#: because backward quantizes the output's gradient first (jax/layernorm_mlp.py of 2.20.2).
PARTS = {"": ("", ""), "_0": ("wi", "_1"), "_1": ("wo", "_0")}
_NAME = re.compile(rf"(?:{'|'.join(OPERANDS)})(_[01])?_(?:amax_history|scale)")


class autocast(_autocast):
    """Run layers inside the context under a recipe if `enabled`; the default recipe is `DelayedScaling`.

    Raises:
        ValueError: unsupported options of the recipe, or a mesh.
    """

    def __init__(self, enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None) -> None:
        check_unsharded(mesh_resource)
        te_recipe = recipes.DelayedScaling() if recipe is None else recipe
        super().__init__(recipes.recipe_of(te_recipe) if enabled else None, enabled=enabled)


def fp8_autocast(enabled: bool = False, fp8_recipe: Any = None, mesh_resource: MeshResource | None = None) -> autocast:
    """`autocast` under its older name and arguments."""
    return autocast(enabled, fp8_recipe, mesh_resource)


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge two sets of collections in the type of `original`; the new ones take precedence."""
    both = {**original, **new}
    return both if isinstance(original, dict) else type(original)(both)  # type: ignore[call-arg]


def update_fp8_metas(state: Any) -> Any:
    """Return the argument unchanged: the gradient of a recipe's state is already the next state."""
    return state


def own_collections(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the variables of a Transformer Engine checkpoint, including recorded amaxes, to Quaver's collections.

    Args:
        variables: collections by name, with or without `fp8_metas`; "params" are unchanged.
    Raises:
        ValueError: names or shapes in `fp8_metas` that version 2.20 does not have.
    """
    others = {name: value for name, value in variables.items() if name != THEIRS}
    return others | ({COLLECTION: _own(variables[THEIRS], THEIRS)} if THEIRS in variables else {})


def _own(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    states: dict[str, Any] = {name: _own(v, f"{where}.{name}") for name, v in theirs.items() if isinstance(v, Mapping)}
    numbers = set()
    for name in theirs.keys() - states.keys():
        fits = _NAME.fullmatch(name)
        if fits is None:
            raise ValueError(f"{where}.{name} is not recorded by Transformer Engine 2.20: leave {THEIRS} out")
        numbers.add(fits[1] or "")
    for number in sorted(numbers):
        part, gradient_suffix = PARTS[number]
        try:
            names = [f"{x}{gradient_suffix if x == 'grad' else number}" for x in OPERANDS]
            history = jnp.stack([theirs[f"{name}_amax_history"] for name in names], 1)
            scales = jnp.concatenate([theirs[f"{name}_scale"] for name in names])
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where} must have one history and one scale for each of {OPERANDS} ({error}): leave "
                f"{THEIRS} out to measure scales anew"
            ) from None
        # Without recorded amaxes the factor is unset (0).
        own = {"history": history, "factor": jnp.where(history.any(0), scales, 0.0)}
        states |= {part: own} if part else own
    return states
