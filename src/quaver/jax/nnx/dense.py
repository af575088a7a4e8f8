"""DenseGeneral: flax.nnx.LinearGeneral with its three GEMMs under a recipe."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import Array

from quaver import recipes
from quaver.jax import state
from quaver.jax.blocks.options import DenseOptions
from quaver.jax.linears.dot_general import KernelMatrix, dense, dot_general
from quaver.jax.state.context import recipe_in_force
from quaver.options import pick, takes
from quaver.recipes.spec import Recipe

# ---- variable --------------------------------------------------------------------------------------------
# Where an NNX module keeps a recipe's state: Variables of a type whose gradient is their next value.


@nnx.register_variable_name(OVERWRITE_WITH_GRADIENT)
class OverwriteWithGradient(nnx.Variable):
    """State of a quantized layer: `value_and_grad` of this package replaces it by its gradient.

    In a bridge to linen it is the collection "_overwrite_with_gradient".
    """


class LayerState(nnx.Pytree):
    """The state of one linear layer under one recipe: nothing, or Variables `history` and `factor`, or `count`.

    Args:
        recipe: whose state it is; None has none.
        stacked: leading axes of layers that nnx.vmap made.
    """

    def __init__(self, recipe: str | Recipe | None, stacked: tuple[int, ...] = ()) -> None:
        self.of = None if recipe is None else recipes.get(recipe)
        for name, value in state.init(self.of).items():
            setattr(self, name, OverwriteWithGradient(jnp.broadcast_to(value, (*stacked, *value.shape))))

    def read(self, own: str | Recipe | None, where: str) -> dict[str, Array] | None:
        """The state under the recipe in force; None where that needs none.

        A count of random roundings may be missing where no gradients are taken; `linear` sees to that.
        Raises:
            ValueError: the layer was made under another recipe.
        """
        recipe = recipe_in_force(own)
        needed = {} if recipe is None else state.init(recipe)
        if not needed:
            return None
        if set(needed) == {"count"} and not hasattr(self, "count"):
            return None
        held: dict[str, Any] = {name: getattr(self, name, None) for name in needed}
        if any(held[name] is None or held[name].shape != value.shape for name, value in needed.items()):
            raise ValueError(
                f"{where} runs under recipe {str(recipe)!r} and has {self._what()}. Make the model under that recipe "
                f"(with quaver.jax.autocast({str(recipe)!r}): model = ...), or quaver.jax.nnx.convert(model, recipe)"
            )
        return {name: variable[...] for name, variable in held.items()}

    def _what(self) -> str:
        return "no state: it was made without a recipe" if self.of is None else f"the state of recipe {str(self.of)!r}"


def fresh_state(own: str | Recipe | None) -> LayerState:
    """The state that a new layer gets: that of its own recipe, else that of the ambient one."""
    return LayerState(recipe_in_force(own) if own is None else own)


def joined(*names: str) -> str:
    """Names of modules, one inside the other, with dots."""
    return ".".join(name for name in names if name)


def label(module: Any) -> str:
    """The name of a module in a message."""
    return f"{type(module).__name__} {module.name or '(unnamed)'}"


# ---- dense -----------------------------------------------------------------------------------------------


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


def dense_of(options: Any, name: str, inputs: int | tuple[int, ...], matrix: KernelMatrix) -> DenseGeneral:
    """A layer's part over the last axes, with the layer's options."""
    own = pick(DenseOptions, options) | of_part(options, name) | matrix.named(options.partition)
    return DenseGeneral(inputs, matrix.features, **own)


def of_part(options: Any, name: str) -> dict[str, Any]:
    """The `Parameters` of a layer's part: its name stands behind the layer's."""
    return pick(Parameters, options) | {"name": joined(options.name, name)}


# ---- inject ----------------------------------------------------------------------------------------------
# Recipes for models made of Flax's own modules: operations that fit the slots of those modules.
#
# nnx.Linear(512, 2048, dot_general=DotGeneral("tensorwise"), rngs=rngs)
# nnx.Einsum("bd,df->bf", (512, 2048), einsum_op=Einsum("mxfp8"), rngs=rngs)


class _Operation(nnx.Module):
    """What the operations below share: a recipe, and the state of the layer that one is put into."""

    def __init__(self, recipe: str | Recipe | None = None, *, seed: int = 0, name: str = "") -> None:
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe)

    def _operation(self) -> Callable[..., Array]:
        state = self.state.read(self.recipe, label(self))
        return functools.partial(dot_general, recipe=self.recipe, state=state, name=self.name, seed=self.seed)


class DotGeneral(_Operation):
    """jax.lax.dot_general of an input and a kernel under a recipe, with that layer's state: one for each layer.

    Args:
        recipe: name or Recipe; None takes the ambient one.
        seed, name: of stochastic rounding, as DenseGeneral's.
    """

    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
        return self._operation()(lhs, rhs, dimension_numbers, *args, **options)


class Einsum(_Operation):
    """jnp.einsum of an input and a kernel under a recipe, with that layer's state; the second operand is the kernel.

    Args: as DotGeneral's.
    """

    def __call__(self, equation: str, lhs: Array, rhs: Array, **options: Any) -> Array:
        return jnp.einsum(equation, lhs, rhs, _dot_general=self._operation(), **options)


# ---- gradient --------------------------------------------------------------------------------------------
# Gradients of a loss, with the states of quantized layers brought to their next value on the way.


def value_and_grad(
    loss: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., Any]:
    """`nnx.value_and_grad` that also writes each layer's next state into the model.

    Args:
        loss: a function whose arguments `argnums` are modules.
        argnums, has_aux: as `nnx.value_and_grad` takes them.
        wrt: filter of the parameters to differentiate by, as nnx.Optimizer takes it.
    Returns:
        A function of the loss's arguments that returns (loss, gradients); the gradients are of the parameters alone and
        fit `nnx.Optimizer(model, tx, wrt=wrt).update(model, gradients)`. Layers that took no part keep their state.
    Exact: the states.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wanted = nnx.Any(wrt, OverwriteWithGradient)
    run = nnx.value_and_grad(loss, argnums=tuple(nnx.DiffState(i, wanted) for i in numbers), has_aux=has_aux)

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        out, gradients = run(*args, **kwargs)
        of_parameters = []
        for number, gradient in zip(numbers, gradients, strict=True):
            after, rest = nnx.split_state(gradient, OverwriteWithGradient, ...)
            before = nnx.state(args[number], OverwriteWithGradient)
            following = state.update(nnx.to_pure_dict(before), nnx.to_pure_dict(after))
            nnx.replace_by_pure_dict(before, following)
            nnx.update(args[number], before)
            of_parameters.append(rest)
        return out, of_parameters[0] if isinstance(argnums, int) else tuple(of_parameters)

    return value_and_gradients
