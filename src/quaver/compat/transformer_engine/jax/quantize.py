"""Transformer Engine's contexts for JAX, over `quaver.jax.autocast`, and what it does with collections."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.compat.transformer_engine.jax.sharding import MeshResource, check_unsharded
from quaver.jax.linen.dense import COLLECTION
from quaver.jax.state.context import autocast as _autocast

#: The collection whose gradient is its next value.
NVTE_FP8_COLLECTION_NAME = COLLECTION
#: That of Transformer Engine's own checkpoints.
THEIRS = "fp8_metas"
#: What it keeps of operands, in the order of ours; an MLP's two layers by its numbers, and that of their gradients: its
#: backward quantizes the output's gradient first, and with the first (jax/layernorm_mlp.py of 2.20.2).
OPERANDS = "x", "kernel", "grad"
PARTS = {"": ("", ""), "_0": ("wi", "_1"), "_1": ("wo", "_0")}
_NAME = re.compile(rf"(?:{'|'.join(OPERANDS)})(_[01])?_(?:amax_history|scale)")


class autocast(_autocast):
    """Run the layers inside under a recipe, if `enabled`; without one it is `DelayedScaling`.

    Raises:
        ValueError: options of the recipe that are not there, or a mesh.
    """

    def __init__(self, enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None) -> None:
        check_unsharded(mesh_resource)
        given = recipes.DelayedScaling() if recipe is None else recipe
        super().__init__(recipes.recipe_of(given) if enabled else None, enabled=enabled)


def fp8_autocast(enabled: bool = False, fp8_recipe: Any = None, mesh_resource: MeshResource | None = None) -> autocast:
    """`autocast` by its older name and arguments."""
    return autocast(enabled, fp8_recipe, mesh_resource)


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Mapping[str, Any]:
    """The collections of both, of the kind of `original`; where both have one, the new."""
    both = {**original, **new}
    return both if isinstance(original, dict) else type(original)(both)  # type: ignore[call-arg]


def update_fp8_metas(state: Any) -> Any:
    """What it is given: the gradient of a recipe's state is the next state already."""
    return state


def own_collections(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a checkpoint of Transformer Engine's, with what it recorded as the state of ours.

    Args:
        variables: collections by name, `fp8_metas` among them or not; "params" stay as they are.
    Raises:
        ValueError: names or shapes in `fp8_metas` that 2.20 does not have.
    """
    others = {name: value for name, value in variables.items() if name != THEIRS}
    return others | ({COLLECTION: _own(variables[THEIRS], THEIRS)} if THEIRS in variables else {})


def _own(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    held: dict[str, Any] = {name: _own(v, f"{where}.{name}") for name, v in theirs.items() if isinstance(v, Mapping)}
    numbers = set()
    for name in theirs.keys() - held.keys():
        fits = _NAME.fullmatch(name)
        if fits is None:
            raise ValueError(f"{where}.{name} is nothing that Transformer Engine 2.20 records: leave {THEIRS} out")
        numbers.add(fits[1] or "")
    for number in sorted(numbers):
        part, of_gradient = PARTS[number]
        try:
            names = [f"{x}{of_gradient if x == 'grad' else number}" for x in OPERANDS]
            history = jnp.stack([theirs[f"{name}_amax_history"] for name in names], 1)
            scales = jnp.concatenate([theirs[f"{name}_scale"] for name in names])
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where} has not one history and one scale of each of {OPERANDS} ({error}): leave {THEIRS} out, and "
                "scales are measured anew"
            ) from None
        # A scale that nothing has been recorded for is unset.
        own = {"history": history, "factor": jnp.where(history.any(0), scales, 0.0)}
        held |= {part: own} if part else own
    return held
