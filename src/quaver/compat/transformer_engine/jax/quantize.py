"""Transformer Engine's contexts for JAX, over `quaver.jax.autocast`, and what it does with collections."""

from collections.abc import Mapping
from typing import Any

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.compat.transformer_engine.jax.sharding import MeshResource, check_unsharded
from quaver.jax.linen.state import COLLECTION
from quaver.jax.state.context import autocast as _autocast

#: The collection whose gradient is its next value.
NVTE_FP8_COLLECTION_NAME = COLLECTION


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
