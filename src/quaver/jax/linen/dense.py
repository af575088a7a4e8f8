"""DenseGeneral: flax.linen's, with its three GEMMs under a recipe."""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from flax import linen as nn
from flax.core import meta
from jax import Array
from jax.typing import DTypeLike

from quaver.core.options import pick, suggests
from quaver.jax.blocks.options import DenseOptions, Initializer
from quaver.jax.linears.general import Matrix, dense, normalize_axes
from quaver.jax.linen.state import layer_state, qualified_name
from quaver.jax.numerics.given import array


@suggests
class DenseGeneral(nn.Module, DenseOptions):
    """A linear layer over any axes; parameters `kernel` and `bias` as those of flax.linen.DenseGeneral.

    Attributes:
        features: how many outputs; several make several axes.
        axis: of the input that are contracted.
        use_bias: add a bias.
        dtype: of the computation; None promotes the input's and the kernel's.
        param_dtype: of the parameters.
        kernel_init, bias_init: initializers; they see the kernel as a matrix, so that fan-in is what it is.
        kernel_axes, bias_axes: logical names of the parameters' axes, for flax's sharding rules; empty names none.
        recipe: name or Recipe that this layer always uses; None takes the ambient one.
        seed: of stochastic rounding.
    Raises:
        ValueError: the recipe's state was not given, see `quaver.jax.linen.state`.
    Exact, bounded: as `quaver.jax.linear`.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    kernel_axes: tuple[str | None, ...] = field(default=(), kw_only=True)
    bias_axes: tuple[str | None, ...] = field(default=(), kw_only=True)

    @nn.compact
    def __call__(self, x: Array) -> Array:
        features = (self.features,) if isinstance(self.features, int) else tuple(self.features)
        x = array(qualified_name(self) or "DenseGeneral", "x", x)
        axes = normalize_axes(self.axis, x.ndim)
        shape = (*(x.shape[a] for a in axes), *features)
        kernel_init = _as_matrix(self.kernel_init, len(axes), self.kernel_axes)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", _as_matrix(self.bias_init, 0, self.bias_axes), features, self.param_dtype)
        return dense(
            x,
            kernel,
            bias,
            axis=axes,
            dtype=self.dtype,
            recipe=self.recipe,
            state=layer_state(self, self.recipe),
            name=qualified_name(self),
            seed=self.seed,
        )


def dense_of(layer: Any, name: str, matrix: Matrix) -> DenseGeneral:
    """A layer's part over the last axes, with the layer's options."""
    axis = range(len(matrix.features) - len(matrix.axes), 0)
    return DenseGeneral(
        matrix.features, axis=tuple(axis), **pick(DenseOptions, layer), **matrix.named(layer.partition), name=name
    )


def _as_matrix(init: Initializer, rows: int, names: tuple[str | None, ...]) -> Initializer:
    """The initializer for [*rows, *columns], run on a matrix; for a vector if there are no rows."""

    def initialize(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Any:
        flat = (math.prod(shape[:rows]),) if rows else ()
        value = init(key, (*flat, math.prod(shape[rows:])), dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, value.unbox().reshape(shape))
        return value.reshape(shape)

    return nn.with_logical_partitioning(initialize, names) if names else initialize
