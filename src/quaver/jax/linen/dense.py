"""DenseGeneral for linen under a recipe, the collection of its state, and operations for the slots of Flax's own
modules.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import Array
from jax.typing import DTypeLike

from quaver import recipes
from quaver.jax import state
from quaver.jax.blocks.options import DenseOptions, Initializer
from quaver.jax.linears.dot_general import KernelMatrix, dense, dot_general, normalize_axes
from quaver.jax.numerics.quantized import array
from quaver.jax.state.context import recipe_in_force
from quaver.options import pick, suggests
from quaver.recipes.spec import Recipe

# ---- state: the collection whose gradient is its next value ----
#
# It is Flax's own collection, so `flax.training.train_state.TrainState` and other code for Flax's FP8 modules support
# it. A layer that is called several times in one step (`uses`) stores a slice for each call, because autodiff would sum
# their gradients. In an nn.scan with variable_broadcast="params", variable_axes={COLLECTION: 0} does so.

#: "_overwrite_with_gradient".
COLLECTION = OVERWRITE_WITH_GRADIENT


def layer_state(module: nn.Module, own: str | Recipe | None, uses: int = 1) -> dict[str, Array] | None:
    """Return the state of a module's linear layer under the recipe in force, created by `init`; None if it needs none.

    The count of stochastic rounding may be missing if no gradients are taken; `linear` checks that.

    Args:
        module: the module that stores the state.
        own: the module's own recipe.
        uses: number of calls of the module in one step.
    Raises:
        ValueError: the collection was not passed to `apply`, or belongs to another recipe.
    """
    recipe = recipe_in_force(own)
    fresh = state.init(recipe, uses)
    if not fresh:
        return None
    available = all(module.has_variable(COLLECTION, key) for key in fresh) or module.is_mutable_collection(COLLECTION)
    if not available and set(fresh) == {"count"}:
        return None
    where = f"{type(module).__name__} {'.'.join(module.path) or '(root)'} under recipe {str(recipe)!r}"
    if not available:
        raise ValueError(
            f"{where} needs its state, {' and '.join(fresh)} in the collection {COLLECTION!r}, but it was not "
            "passed. Initialize under the same recipe (with quaver.jax.autocast(recipe): variables = "
            "model.init(...)) and pass all variables to apply, not 'params' alone; nn.scan and nn.vmap need the "
            "collection in variable_axes"
        )
    variables = {key: module.variable(COLLECTION, key, lambda value=value: value).value for key, value in fresh.items()}
    for key, value in fresh.items():
        if variables[key].shape != value.shape:
            raise ValueError(
                f"{where} has a {key} of shape {variables[key].shape} and needs {value.shape}: it belongs to another "
                "recipe or another number of uses; initialize under this one, and keep your params"
            )
    return state.use(variables, uses, qualified_name(module) or "this layer")


def qualified_name(module: nn.Module) -> str:
    """Return the module's path with dots, as in PyTorch; it selects the streams of stochastic rounding."""
    return ".".join(module.path)


# ---- DenseGeneral ----


@suggests
class DenseGeneral(nn.Module, DenseOptions):
    """A linear layer over any axes, with parameters `kernel` and `bias` like flax.linen.DenseGeneral.

    Attributes:
        features: output features; several make several axes.
        axis: axes of the input that are contracted.
        use_bias: True for a bias.
        dtype: dtype of the computation; None promotes the input's and the kernel's.
        param_dtype: dtype of the parameters.
        kernel_init, bias_init: initializers; they see the kernel as a matrix, so that fan-in is correct.
        kernel_axes, bias_axes: logical names of the parameters' axes, for flax's sharding rules; empty for none.
        recipe: name or Recipe that this layer always uses; None uses the ambient one.
        seed: seed of stochastic rounding.
        uses: number of calls in one step, for recipes with state; another number raises an error in backward.
    Raises:
        ValueError: the recipe's state was not passed, see `quaver.jax.linen.dense`.
    Exact and bounded: as `quaver.jax.linear`.
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
            state=layer_state(self, self.recipe, self.uses),
            name=qualified_name(self),
            seed=self.seed,
        )


def dense_of(layer: Any, name: str, matrix: KernelMatrix) -> DenseGeneral:
    """Return a DenseGeneral over the last axes with the layer's options."""
    axis = range(len(matrix.features) - len(matrix.axes), 0)
    return DenseGeneral(
        matrix.features, axis=tuple(axis), **pick(DenseOptions, layer), **matrix.named(layer.partition), name=name
    )


def _as_matrix(init: Initializer, rows: int, names: tuple[str | None, ...]) -> Initializer:
    """Return an initializer for [*rows, *columns] that runs `init` on a matrix; on a vector if rows is 0."""

    def initialize(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Any:
        flat = (math.prod(shape[:rows]),) if rows else ()
        value = init(key, (*flat, math.prod(shape[rows:])), dtype)
        if isinstance(value, meta.AxisMetadata):
            return meta.replace_boxed(value, value.unbox().reshape(shape))
        return value.reshape(shape)

    return nn.with_logical_partitioning(initialize, names) if names else initialize


# ---- operations for the slots of Flax's own modules ----
#
# nn.Dense(4096, dot_general_cls=dot_general_cls("tensorwise"))


def dot_general_cls(recipe: str | Recipe | None = None, *, seed: int = 0, uses: int = 1) -> Callable[[], "DotGeneral"]:
    """Return a class for the slot `dot_general_cls` of flax.linen's Dense, DenseGeneral and
    MultiHeadDotProductAttention.

    Args:
        recipe: name or Recipe; None uses the ambient one.
        seed: seed of stochastic rounding.
        uses: number of calls of the layer in one step, for recipes with state.
    Returns:
        A callable without arguments that creates the operation.
    Raises:
        ValueError: unknown recipe.
    """
    return functools.partial(DotGeneral, recipe=None if recipe is None else recipes.get(recipe), seed=seed, uses=uses)


def einsum_cls(recipe: str | Recipe | None = None, *, seed: int = 0, uses: int = 1) -> Callable[[], "Einsum"]:
    """Return a class for models that take an einsum, as with flax.linen.fp8_ops.Fp8Einsum; arguments as
    `dot_general_cls`.
    """
    return functools.partial(Einsum, recipe=None if recipe is None else recipes.get(recipe), seed=seed, uses=uses)


class DotGeneral(nn.Module):
    """Module of jax.lax.dot_general with input and kernel under a recipe; it stores the state of delayed scaling."""

    recipe: str | Recipe | None = None
    seed: int = 0
    uses: int = 1

    @nn.compact
    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
        return _operation(self)(lhs, rhs, dimension_numbers, *args, **options)


class Einsum(nn.Module):
    """Module of jnp.einsum with input and kernel under a recipe; the second operand is the kernel."""

    recipe: str | Recipe | None = None
    seed: int = 0
    uses: int = 1

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Array:
        run = _operation(self)
        return jnp.einsum(
            equation, lhs, rhs, precision=precision, preferred_element_type=preferred_element_type, _dot_general=run
        )


def _operation(module: Any) -> Callable[..., Array]:
    """Return `dot_general` with a module's recipe and state."""
    # Use the name of the layer that contains this module: "layers_0.Dense_0", not "….DotGeneral_0".
    layer = qualified_name(module).rpartition(".")[0]
    state = layer_state(module, module.recipe, module.uses)
    return functools.partial(dot_general, recipe=module.recipe, state=state, name=layer, seed=module.seed)
