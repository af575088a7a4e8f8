"""`linear` over any axes: what DenseGeneral computes, in either flavour of Flax."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.linears.function import linear
from quaver.jax.numerics.given import array


@dataclass(frozen=True)
class Matrix:
    """A kernel inside of a layer."""

    # How many outputs; several make several axes.
    features: tuple[int, ...]
    # Names of the kernel's axes, for sharding by logical names.
    axes: tuple[str | None, ...]

    def named(self, partition: bool) -> dict[str, Any]:
        """DenseGeneral's arguments that name the axes, or none."""
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
    """Contract the axes of x with the first axes of the kernel.

    Args:
        x: array with the axes `axis` among others.
        kernel: [*sizes of those axes in their order in x, *features].
        bias: [*features].
        axis: one or more axes of x.
        dtype: x is cast to it and the result has it; None promotes x's and the kernel's.
            A quantized kernel is quantized from the dtype that it is stored in.
        recipe, state, name, seed: as `linear` takes them.
    Returns:
        [*the other axes of x, *features].
    Raises:
        ValueError: sizes that do not fit.
    Exact, bounded: as `linear`.
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
    """Axes counted from 0, ascending."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) != len(axes) or not axes:
        raise ValueError(f"axis {axis} does not name different axes of an array with {ndim} of them")
    return tuple(sorted(a % ndim for a in axes))
