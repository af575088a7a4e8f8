"""DenseGeneral: flax.nnx.LinearGeneral with its three GEMMs under a recipe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from flax import nnx
from jax import Array

from quaver.core.options import pick, takes
from quaver.jax.blocks.options import DenseOptions
from quaver.jax.linears.general import Matrix, dense
from quaver.jax.nnx.variable import fresh_state, joined, label


@dataclass(kw_only=True)
class Parameters:
    """What a constructor needs that makes parameters."""

    # What else the parameters' Variables shall carry.
    kernel_metadata: Mapping[str, Any] | None = None
    bias_metadata: Mapping[str, Any] | None = None
    # With dots, tells the streams of random rounding apart.
    name: str = ""
    # The stream "params" is drawn from.
    rngs: nnx.Rngs


@dataclass
class DenseArguments(DenseOptions, Parameters):
    """The arguments of `DenseGeneral`, which says what they are."""

    in_features: int | Sequence[int]
    features: int | Sequence[int]
    _: KW_ONLY
    axis: int | Sequence[int] | None = None
    kernel_axes: tuple[str | None, ...] = ()
    bias_axes: tuple[str | None, ...] = ()


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

    @takes(DenseArguments)
    def __init__(self, options: DenseArguments) -> None:
        inputs, features, axis = options.in_features, options.features, options.axis
        rows = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        columns = (features,) if isinstance(features, int) else tuple(features)
        axes = tuple(range(-len(rows), 0)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if len(axes) != len(rows):
            raise ValueError(f"in_features {inputs} and axis {axis} name different numbers of axes")
        draw = options.rngs.params
        matrix = options.kernel_init(draw(), (math.prod(rows), math.prod(columns)), options.param_dtype)
        of_kernel = _metadata(options.kernel_axes, options.kernel_metadata)
        self.kernel = nnx.Param(matrix.reshape(*rows, *columns), **of_kernel)
        self.bias = nnx.data(None)
        if options.use_bias:
            vector = options.bias_init(draw(), (math.prod(columns),), options.param_dtype)
            self.bias = nnx.Param(vector.reshape(columns), **_metadata(options.bias_axes, options.bias_metadata))
        self.axis = axes
        self.ndim = len(rows) + len(columns)
        self.dtype = options.dtype
        self.recipe = options.recipe
        self.seed = options.seed
        self.name = options.name
        self.state = fresh_state(options.recipe)

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


def dense_of(options: Any, name: str, inputs: int | tuple[int, ...], matrix: Matrix) -> DenseGeneral:
    """A layer's part over the last axes, with the layer's options."""
    own = pick(DenseOptions, options) | of_part(options, name) | matrix.named(options.partition)
    return DenseGeneral(inputs, matrix.features, **own)


def of_part(options: Any, name: str) -> dict[str, Any]:
    """The `Parameters` of a layer's part: its name stands behind the layer's."""
    return pick(Parameters, options) | {"name": joined(options.name, name)}
