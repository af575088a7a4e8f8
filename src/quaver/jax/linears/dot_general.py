"""`dot_general` and `dense`: quantized replacements of `lax.dot_general` and DenseGeneral's contraction."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from quaver.jax.linears.function import linear
from quaver.jax.numerics.quantized import array
from quaver.jax.state import buffers
from quaver.jax.state.buffers import State
from quaver.jax.state.context import recipe_in_force
from quaver.recipes.spec import Recipe

# ---- dot_general ----

DimensionNumbers = tuple[tuple[Any, Any], tuple[Any, Any]]


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: str | Recipe | None = None,
    state: State | None = None,
    name: str = "dot_general",
    seed: int = 0,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.dot_general` with quantized operands: lhs as the input of a linear layer, rhs as its weight.

    Args:
        lhs, rhs, dimension_numbers: as for `jax.lax.dot_general`. Batch axes give one GEMM per slice, each with its own
            scales; the slices share a state.
        precision: precision if nothing is quantized.
        preferred_element_type: dtype of the output; None promotes those of lhs and rhs.
        recipe, state, name, seed: as for `quaver.jax.linear`.
        out_sharding: as for `jax.lax.dot_general`, if nothing is quantized.
    Raises:
        ValueError, TypeError: as `quaver.jax.linear` and `jax.lax.dot_general`.
    Exact and bounded: as `quaver.jax.linear`.
    """
    in_force = recipe_in_force(recipe)
    if in_force is None or not in_force.quantizes:
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
    lhs, rhs = array(name, "lhs", lhs), array(name, "rhs", rhs)
    (contract_l, contract_r), (batch_l, batch_r) = _dimensions(name, lhs, rhs, dimension_numbers)
    free_l, free_r = _rest(lhs.ndim, contract_l, batch_l), _rest(rhs.ndim, contract_r, batch_r)
    batch, lead, k = _sizes(lhs, batch_l), _sizes(lhs, free_l), math.prod(_sizes(lhs, contract_l))
    out = _sizes(rhs, free_r)
    x = lhs.transpose(*batch_l, *free_l, *contract_l)
    w = rhs.transpose(*batch_r, *contract_r, *free_r)
    dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type

    def slice_(x: Array, w: Array, state: State | None) -> Array:
        return linear(x, w, recipe=recipe, state=state, dtype=dtype, name=name, seed=seed)

    if not batch:
        y = slice_(x.reshape(*lead, k), w.reshape(k, math.prod(out)), state)
    else:
        slices = math.prod(batch)
        shared = buffers.share({} if state is None else state, slices)
        y = jax.vmap(slice_)(x.reshape(slices, *lead, k), w.reshape(slices, k, math.prod(out)), shared)
    return y.reshape(*batch, *lead, *out)


def _dimensions(name: str, lhs: Array, rhs: Array, numbers: Any) -> list[list[tuple[int, ...]]]:
    """Validate the dimension numbers as `jax.lax.dot_general` does, and return them as tuples."""
    try:
        if not all(_may_be_axes(leaf) for leaf in jax.tree.leaves(numbers)):
            raise TypeError
        contract, batch = ([tuple(map(operator.index, axes)) for axes in pair] for pair in numbers)
        if len(contract) != 2 or len(batch) != 2:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: dimension_numbers are ((axes of lhs, axes of rhs) to sum over, (axes of lhs, axes of rhs) of a "
            f"batch), such as (((1,), (0,)), ((), ())), not {numbers!r}"
        ) from None
    jax.eval_shape(lambda a, b: lax.dot_general(a, b, (tuple(contract), tuple(batch))), lhs, rhs)  # type: ignore[arg-type]
    return [contract, batch]


def _may_be_axes(leaf: object) -> bool:
    """Return False for arrays that are not integers; JAX raises an AssertionError for those while tracing."""
    return not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jnp.integer)


def _sizes(x: Array, axes: Sequence[int]) -> list[int]:
    return [x.shape[i] for i in axes]


def _rest(ndim: int, *used: tuple[int, ...]) -> list[int]:
    return [i for i in range(ndim) if not any(i in axes for axes in used)]


# ---- dense: `linear` over any axes, as DenseGeneral computes it ----


@dataclass(frozen=True)
class KernelMatrix:
    """Shape of a kernel in a layer."""

    # Output features; several make several axes.
    features: tuple[int, ...]
    # Names of the kernel's axes, for sharding by logical names.
    axes: tuple[str | None, ...]

    def named(self, partition: bool) -> dict[str, Any]:
        """Return DenseGeneral's arguments that name the axes, or none."""
        if not partition:
            return {}
        return {"kernel_axes": self.axes, "bias_axes": self.axes[-len(self.features) :]}


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    axis: int | Sequence[int] = -1,
    dtype: DTypeLike | None = None,
    recipe: str | Recipe | None = None,
    state: Mapping[str, Array] | None = None,
    name: str = "linear",
    seed: int = 0,
) -> Array:
    """Contract axes of x with the first axes of the kernel, under a recipe.

    Args:
        x: input.
        kernel: [*sizes of the contracted axes in their order in x, *features].
        bias: [*features].
        axis: one or more axes of x.
        dtype: x is cast to it, and the result has it; None promotes x's and the kernel's. The kernel is quantized from
            its own dtype.
        recipe, state, name, seed: as for `linear`.
    Returns:
        [*the other axes of x, *features].
    Raises:
        ValueError: sizes that do not fit.
    Exact and bounded: as `linear`.
    """
    where = name or "dense"
    x, kernel = array(where, "x", x), array(where, "kernel", kernel)
    bias = None if bias is None else array(where, "bias", bias)
    axes = normalize_axes(axis, x.ndim)
    sizes = tuple(x.shape[a] for a in axes)
    features = kernel.shape[len(axes) :]
    if kernel.shape[: len(axes)] != sizes:
        raise ValueError(
            f"{name or 'dense'} contracts axes {axes} of x {x.shape}, whose sizes are {sizes}, "
            f"with a kernel {kernel.shape}; its first sizes must be the same"
        )
    others = [a for a in range(x.ndim) if a not in axes]
    if axes != tuple(range(x.ndim - len(axes), x.ndim)):
        x = x.transpose(*others, *axes)
    rest = x.shape[: len(others)]
    y = linear(
        x.reshape(*rest, math.prod(sizes)),
        kernel.reshape(math.prod(sizes), math.prod(features)),
        None if bias is None else bias.reshape(-1),
        recipe=recipe,
        state=None if state is None else dict(state),
        dtype=dtype,
        name=name,
        seed=seed,
    )
    return y.reshape(*rest, *features)


def normalize_axes(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return non-negative axes in ascending order."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) != len(axes) or not axes:
        raise ValueError(f"axis {axis} does not name different axes of an array with {ndim} of them")
    return tuple(sorted(a % ndim for a in axes))
