"""DenseGeneral for NNX under a recipe, the Variables of its state, operations for Flax's slots, and
`value_and_grad`.
"""

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

# ---- state: Variables of a type whose gradient is their next value ----


@nnx.register_variable_name(OVERWRITE_WITH_GRADIENT)
class OverwriteWithGradient(nnx.Variable):
    """Variable for the state of a quantized layer; this package's `value_and_grad` replaces it by its gradient.

    In a bridge to linen it is the collection "_overwrite_with_gradient".
    """


class LayerState(nnx.Pytree):
    """State of one linear layer under one recipe: no Variables, or `history` and `factor`, or `count`.

    Args:
        recipe: recipe that the state belongs to; None for no state.
        stacked: leading axes of layers stacked by nnx.vmap.
        uses: number of calls of the layer in one step.
    """

    def __init__(self, recipe: str | Recipe | None, stacked: tuple[int, ...] = (), uses: int = 1) -> None:
        self.of = None if recipe is None else recipes.get(recipe)
        self.uses = uses
        for name, value in state.init(self.of, uses).items():
            setattr(self, name, OverwriteWithGradient(jnp.broadcast_to(value, (*stacked, *value.shape))))

    def read(self, own: str | Recipe | None, where: str) -> dict[str, Array] | None:
        """Return the state under the recipe in force; None if that needs none.

        The count of stochastic rounding may be missing if no gradients are taken; `linear` checks that.

        Raises:
            ValueError: the layer was made under another recipe.
        """
        recipe = recipe_in_force(own)
        needed = state.init(recipe, self.uses)
        if not needed:
            return None
        if set(needed) == {"count"} and not hasattr(self, "count"):
            return None
        variables: dict[str, Any] = {name: getattr(self, name, None) for name in needed}
        if any(variables[name] is None or variables[name].shape != value.shape for name, value in needed.items()):
            raise ValueError(
                f"{where} runs under recipe {str(recipe)!r} and has {self._what()}. Make the model under that recipe "
                f"(with quaver.jax.autocast({str(recipe)!r}): model = ...), or quaver.jax.nnx.convert(model, recipe)"
            )
        return state.use({name: variable[...] for name, variable in variables.items()}, self.uses, where)

    def _what(self) -> str:
        return "no state: it was made without a recipe" if self.of is None else f"the state of recipe {str(self.of)!r}"


def fresh_state(own: str | Recipe | None, uses: int = 1) -> LayerState:
    """Return the state of a new layer: for its own recipe, else for the ambient one."""
    return LayerState(recipe_in_force(own) if own is None else own, uses=uses)


def joined(*names: str) -> str:
    """Join the names of nested modules with dots."""
    return ".".join(name for name in names if name)


def label(module: Any) -> str:
    """Return the name of a module for error messages."""
    return f"{type(module).__name__} {module.name or '(unnamed)'}"


# ---- DenseGeneral ----


@dataclass(kw_only=True)
class Parameters:
    """Constructor arguments of modules that create parameters."""

    # Further metadata of the parameters' Variables.
    kernel_metadata: Mapping[str, Any] | None = None
    bias_metadata: Mapping[str, Any] | None = None
    # Name with dots; it selects the streams of stochastic rounding.
    name: str = ""
    # Random streams; parameters use "params".
    rngs: nnx.Rngs


@dataclass
class DenseArguments(DenseOptions, Parameters):
    """Constructor arguments of `DenseGeneral`; see there."""

    in_features: int | Sequence[int]
    features: int | Sequence[int]
    _: KW_ONLY
    axis: int | Sequence[int] | None = None
    kernel_axes: tuple[str | None, ...] = ()
    bias_axes: tuple[str | None, ...] = ()


class DenseGeneral(nnx.Module):
    """A linear layer over any axes, with parameters `kernel` and `bias` like the linen module.

    Args:
        in_features: size of each contracted axis, one or several.
        features: output features; several make several axes.
        axis: axes of the input that are contracted; None uses the last ones.
        use_bias: True for a bias.
        dtype: dtype of the computation; None promotes the input's and the kernel's.
        param_dtype: dtype of the parameters.
        kernel_init, bias_init: initializers; they see the kernel as a matrix, so that fan-in is correct.
        kernel_axes, bias_axes: names of the parameters' axes, mesh or logical names, for NNX's eager sharding:
            construct the module in `jax.set_mesh(mesh)`, for logical names also in `nnx.logical_axis_rules(rules)`.
            Empty for none.
        kernel_metadata, bias_metadata: further metadata of the parameters' Variables.
        recipe: name or Recipe that this layer always uses; None uses the ambient one.
        seed: seed of stochastic rounding.
        uses: number of calls in one step, for recipes with state; another number raises an error in backward.
        name: name with dots, which selects the streams of stochastic rounding; `convert` sets every layer's path.
        rngs: random streams; parameters use "params".
    Raises:
        ValueError: the layer has no state for the recipe in force.
    Exact and bounded: as `quaver.jax.linear`.
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
        kernel_metadata = _metadata(options.kernel_axes, options.kernel_metadata)
        self.kernel = nnx.Param(matrix.reshape(*rows, *columns), **kernel_metadata)
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
        self.state = fresh_state(options.recipe, options.uses)

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
    """Return a DenseGeneral over the last axes with the layer's options."""
    own = pick(DenseOptions, options) | of_part(options, name) | matrix.named(options.partition)
    return DenseGeneral(inputs, matrix.features, **own)


def of_part(options: Any, name: str) -> dict[str, Any]:
    """Return the `Parameters` of a layer's part, with its name appended to the layer's."""
    return pick(Parameters, options) | {"name": joined(options.name, name)}


# ---- operations for the slots of Flax's own modules ----
#
#     nnx.Linear(512, 2048, dot_general=DotGeneral("tensorwise"), rngs=rngs)
#     nnx.Einsum("bd,df->bf", (512, 2048), einsum_op=Einsum("mxfp8"), rngs=rngs)


class _Operation(nnx.Module):
    """Base class of the operations below: a recipe, and the state of the layer that contains it."""

    def __init__(self, recipe: str | Recipe | None = None, *, seed: int = 0, name: str = "", uses: int = 1) -> None:
        self.recipe = recipe
        self.seed = seed
        self.name = name
        self.state = fresh_state(recipe, uses)

    def _operation(self) -> Callable[..., Array]:
        state = self.state.read(self.recipe, label(self))
        return functools.partial(dot_general, recipe=self.recipe, state=state, name=self.name, seed=self.seed)


class DotGeneral(_Operation):
    """Module of jax.lax.dot_general with input and kernel under a recipe, with state; use one per layer.

    Args:
        recipe: name or Recipe; None uses the ambient one.
        seed, name, uses: as for DenseGeneral.
    """

    def __call__(self, lhs: Array, rhs: Array, dimension_numbers: Any, *args: Any, **options: Any) -> Array:
        return self._operation()(lhs, rhs, dimension_numbers, *args, **options)


class Einsum(_Operation):
    """Module of jnp.einsum with input and kernel under a recipe, with state; the second operand is the kernel.

    Arguments as for `DotGeneral`.
    """

    def __call__(self, equation: str, lhs: Array, rhs: Array, **options: Any) -> Array:
        return jnp.einsum(equation, lhs, rhs, _dot_general=self._operation(), **options)


# ---- value_and_grad ----


def value_and_grad(
    loss: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., Any]:
    """`nnx.value_and_grad` that also writes each layer's next state into the model.

    Args:
        loss: a function whose arguments `argnums` are modules.
        argnums, has_aux: as for `nnx.value_and_grad`.
        wrt: filter of the parameters to differentiate, as for nnx.Optimizer.
    Returns:
        A function of the loss's arguments that returns (loss, gradients). The gradients are those of the parameters
        only, for `nnx.Optimizer(model, tx, wrt=wrt).update(model, gradients)`. Layers that were not used keep their
        state.
    Exact: the states.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wanted = nnx.Any(wrt, OverwriteWithGradient)
    run = nnx.value_and_grad(loss, argnums=tuple(nnx.DiffState(i, wanted) for i in numbers), has_aux=has_aux)

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        out, gradients = run(*args, **kwargs)
        parameter_grads = []
        for number, gradient in zip(numbers, gradients, strict=True):
            after, rest = nnx.split_state(gradient, OverwriteWithGradient, ...)
            before = nnx.state(args[number], OverwriteWithGradient)
            following = state.update(nnx.to_pure_dict(before), nnx.to_pure_dict(after))
            nnx.replace_by_pure_dict(before, following)
            nnx.update(args[number], before)
            parameter_grads.append(rest)
        return out, parameter_grads[0] if isinstance(argnums, int) else tuple(parameter_grads)

    return value_and_gradients
