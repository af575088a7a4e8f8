"""Transformer Engine's contexts for JAX, implemented by `quaver.jax.autocast`, and its functions for collections."""

import enum
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp

from quaver.compat.transformer_engine.common import recipe as recipes
from quaver.compat.transformer_engine.jax.sharding import MeshResource, global_shard_guard
from quaver.jax.linen.dense import COLLECTION
from quaver.jax.state.context import autocast as _autocast
from quaver.recipes import get
from quaver.recipes.spec import QuantSpec

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


class ScalingMode(enum.Enum):
    """How an operand is scaled; `spec` is Quaver's description of it."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5

    @property
    def spec(self) -> QuantSpec | None:
        """How Quaver quantizes such an operand; None for NO_SCALING. NVFP4's 2D blocks are those of weights."""
        name = _RECIPES.get(self.name)
        if name is None:
            return None
        fprop = get(name).fprop
        return fprop.b if self is ScalingMode.NVFP4_2D_SCALING else fprop.a

    def is_tensor_scaling(self) -> bool:
        """Return True for one scale per tensor."""
        return self.name.endswith("TENSOR_SCALING")

    def is_1d_block_scaling(self) -> bool:
        """Return True for a scale per block."""
        return self.is_block_scaling

    @property
    def is_block_scaling(self) -> bool:
        return self.is_mxfp8_scaling or self.is_nvfp4_scaling

    @property
    def is_mxfp8_scaling(self) -> bool:
        return self is ScalingMode.MXFP8_1D_SCALING

    @property
    def is_nvfp4_scaling(self) -> bool:
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)

    def get_scale_dtype(self) -> Any:
        """Return the dtype of decode scales."""
        if self.is_nvfp4_scaling:
            return jnp.float8_e4m3fn
        return jnp.float8_e8m0fnu if self.is_mxfp8_scaling else jnp.float32


_RECIPES = {
    "DELAYED_TENSOR_SCALING": "delayed",
    "MXFP8_1D_SCALING": "mxfp8",
    "CURRENT_TENSOR_SCALING": "tensorwise",
    "NVFP4_1D_SCALING": "nvfp4",
    "NVFP4_2D_SCALING": "nvfp4",
}


class autocast(_autocast):
    """Run layers inside the context under a recipe if `enabled`; the default recipe is `DelayedScaling`.

    `mesh_resource` shards this package's layers, also if `enabled` is False.

    Raises:
        ValueError: unsupported options of the recipe.
    """

    def __init__(self, enabled: bool = False, recipe: Any = None, mesh_resource: MeshResource | None = None) -> None:
        te_recipe = recipes.DelayedScaling() if recipe is None else recipe
        super().__init__(recipes.recipe_of(te_recipe) if enabled else None, enabled=enabled)
        self._arguments = enabled, recipe, mesh_resource
        self._guards: list[AbstractContextManager[None]] = []

    def _recreate_cm(self) -> "autocast":
        return autocast(*self._arguments)

    def __enter__(self) -> "autocast":
        super().__enter__()
        guard = global_shard_guard(self._arguments[2])
        guard.__enter__()
        self._guards.append(guard)
        return self

    def __exit__(self, *error: Any) -> None:
        self._guards.pop().__exit__(*error)
        super().__exit__(*error)


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
