"""DenseGeneral: flax.nnx.LinearGeneral with its three GEMMs under a recipe."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.dense import dense
from quaver.jax.nnx.variable import fresh_state, label

Initializer = Callable[..., Any]

KERNEL_INIT: Initializer = nnx.initializers.lecun_normal()
BIAS_INIT: Initializer = nnx.initializers.zeros_init()


class DenseGeneral(nnx.Module):
    """A linear layer over any axes; `kernel` and `bias` are as those of the linen module.

    Args:
        in_features: the size of each contracted axis, one or several.
        features: how many outputs; several make several axes.
        axis: of the input that are contracted; None takes the last ones.
        use_bias: add a bias.
        dtype: of the computation; None promotes the input's and the kernel's.
        param_dtype: of the parameters.
        kernel_init, bias_init: initializers; they see the kernel as a matrix, so that fan-in is what it is.
        kernel_axes, bias_axes: names of the parameters' axes, of a mesh or logical ones, for NNX's eager sharding: make
            the module in `jax.set_mesh(mesh)`, logical names also in `nnx.logical_axis_rules(rules)`. Empty names none.
        kernel_metadata, bias_metadata: what else the parameters' Variables shall carry.
        recipe: name or Recipe that this layer always uses; None takes the ambient one.
        seed: of stochastic rounding.
        name: with dots, tells the streams of random rounding apart; `convert` gives every layer its path.
        rngs: the stream "params" is drawn from.
    Raises:
        ValueError: the layer has no state for the recipe in force.
    Exact, bounded: as `quaver.jax.linear`.
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        features: int | Sequence[int],
        *,
        axis: int | Sequence[int] | None = None,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        kernel_axes: tuple[str | None, ...] = (),
        bias_axes: tuple[str | None, ...] = (),
        kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] | None = None,
        recipe: str | Recipe | None = None,
        seed: int = 0,
        name: str = "",
        rngs: nnx.Rngs,
    ) -> None:
        rows = (in_features,) if isinstance(in_features, int) else tuple(in_features)
        columns = (features,) if isinstance(features, int) else tuple(features)
        axes = tuple(range(-len(rows), 0)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if len(axes) != len(rows):
            raise ValueError(f"in_features {in_features} and axis {axis} name different numbers of axes")
        matrix = kernel_init(rngs.params(), (math.prod(rows), math.prod(columns)), param_dtype)
        self.kernel = nnx.Param(matrix.reshape(*rows, *columns), **_metadata(kernel_axes, kernel_metadata))
        self.bias = nnx.data(None)
        if use_bias:
            vector = bias_init(rngs.params(), (math.prod(columns),), param_dtype)
            self.bias = nnx.Param(vector.reshape(columns), **_metadata(bias_axes, bias_metadata))
        self.axis = axes
        self.ndim = len(rows) + len(columns)
        self.dtype = dtype
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe)

    def __call__(self, x: Array) -> Array:
        return dense(
            x,
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            axis=self.axis,
            dtype=self.dtype,
            recipe=self.recipe,
            state=self.state.read(self.recipe, label(self)),
            name=self.name,
            seed=self.seed,
        )


def _metadata(axes: tuple[str | None, ...], more: Mapping[str, Any] | None) -> dict[str, Any]:
    return ({"out_sharding": axes} if axes else {}) | dict(more or {})
