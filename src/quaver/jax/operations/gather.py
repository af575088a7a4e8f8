"""Gathering operands in eight bits: a shard is quantized where it lies, and codes and scales travel.

Fully sharded weights (FSDP) and activations sharded along the sequence (SP) are gathered before they are multiplied.
Gathered afterwards in high precision they would cost two to four times the traffic; the codes are the same either way,
for scales agree over the shards first. Backward gathers again, so that what is kept for it is a shard too, and each
gradient is scattered as it is summed.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from quaver.jax.numerics.quantized import Quantized
from quaver.jax.operations.sharding import varying


@dataclass(frozen=True)
class Gather:
    """An operand that lies sharded over a mesh axis and is to be whole on it when it is multiplied.

    Args:
        axis: the mesh axis to gather over.
        sharding: how the operand lies, x [..., K] or w [K, N]: a PartitionSpec that names the axis, or a NamedSharding
            of one. Inside shard_map, of the whole array, as in `in_specs`.
    """

    axis: str
    sharding: PartitionSpec | NamedSharding

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not isinstance(self.sharding, (PartitionSpec, NamedSharding)):
            raise TypeError(
                f"Gather takes the name of a mesh axis and a PartitionSpec or NamedSharding that names it, not "
                f"{self.axis!r} and {self.sharding!r}"
            )

    @property
    def spec(self) -> PartitionSpec:
        return self.sharding.spec if isinstance(self.sharding, NamedSharding) else self.sharding

    def position(self, ndim: int) -> int:
        """Which axis of the operand is cut."""
        for position, names in enumerate(tuple(self.spec)[:ndim]):
            if self.axis in _names(names):
                return position
        raise ValueError(
            f"Gather({self.axis!r}, {self.spec}): the spec says nothing of that axis; give the one the operand has"
        )


class Along(NamedTuple):
    """Where the shards of a matrix lie in the whole matrix."""

    gather: Gather
    #: The axis of the matrix that is cut.
    axis: int
    #: The axes of the operand that were flattened into it, as they are in a shard, and which of them is cut.
    lead: tuple[int, ...]
    position: int
    #: The entries of the PartitionSpec for the matrix' axes.
    entries: tuple[Any, Any]

    @property
    def T(self) -> "Along":
        return Along(self.gather, 1 - self.axis, self.lead, self.position, (self.entries[1], self.entries[0]))


def along_weight(gather: Gather | None, w: Any) -> Along | None:
    """How w [K, N] is gathered."""
    if gather is None:
        return None
    position, shape = gather.position(2), w.shape
    _refuse_whole(gather, w)
    a, b = (*tuple(gather.spec), None, None)[:2]
    return Along(gather, position, (shape[position],), 0, (a, b))


def along_input(gather: Gather | None, x: Any) -> Along | None:
    """How x [..., K] is gathered as the matrix [T, K]."""
    if gather is None:
        return None
    shape, ndim = x.shape, len(x.shape)
    position = gather.position(ndim)
    _refuse_whole(gather, x)
    entries = (*tuple(gather.spec), *[None] * ndim)[:ndim]
    if position == ndim - 1:
        raise ValueError(
            f"Gather({gather.axis!r}, {gather.spec}) cuts x along K, which the GEMM sums over: shard w alike and leave "
            "out the gather"
        )
    others = [entry for i, entry in enumerate(entries[:-1]) if i != position]
    if not _manual(gather) and (any(others) or any(n > 1 for n in shape[:position])):
        raise ValueError(
            f"Gather({gather.axis!r}, {gather.spec}): under jit, activations are gathered in eight bits along their "
            f"first axis, and here it is axis {position} of {ndim}; put the sequence first, or use shard_map"
        )
    return Along(gather, 0, shape[:-1], position, (entries[position], entries[-1]))


def cut_by(along: Along | None, rows: tuple[str, ...], k: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that cut a matrix' axes before it is gathered, from those that still do afterwards."""
    if along is None or not _manual(along.gather):
        return rows, k
    own = (along.gather.axis,)
    return (rows + own, k) if along.axis == 0 else (rows, k + own)


def whole(q: Quantized | Array, along: Along | None) -> Any:
    """The operand gathered: codes and scales, or the array where it is not quantized."""
    if along is None:
        return q
    if not isinstance(q, Quantized):
        return _gathered(q, along)
    # As bytes: XLA on a CPU would send float8 as float16.
    data = lax.bitcast_convert_type(_gathered(lax.bitcast_convert_type(q.data, jnp.uint8), along), q.data.dtype)
    # A block that reaches over all shards has the same scale on each.
    scale = q.scale if q.spec.block[along.axis] is None else _gathered(q.scale, along)
    return Quantized(data, scale, q.tensor_factor, q.amax, q.spec, whole_shape(q.shape, along))


def whole_shape(shape: tuple[int, int], along: Along | None) -> tuple[int, int]:
    """The shape of the matrix that a shard becomes."""
    if along is None or not _manual(along.gather):
        return shape
    size = lax.axis_size(along.gather.axis)
    return (shape[0] * size, shape[1]) if along.axis == 0 else (shape[0], shape[1] * size)


def whole_lead(lead: tuple[int, ...], along: Along | None) -> tuple[int, ...]:
    """The leading axes of x that a shard's become."""
    if along is None or not _manual(along.gather):
        return lead
    size = lax.axis_size(along.gather.axis)
    return tuple(n * size if i == along.position else n for i, n in enumerate(lead))


def piece(gradient: Array, along: Along | None) -> Array:
    """This shard's part of a whole gradient, summed over the axis where the shards have parts of the sum."""
    if along is None:
        return gradient
    gather = along.gather
    if not _manual(gather):
        return _constrained(gradient, along, along.entries)
    size = lax.axis_size(gather.axis)
    view, dim = _unflattened(gradient, along)
    if gather.axis in jax.typeof(view).manual_axis_type.varying:
        view = lax.psum_scatter(view, gather.axis, scatter_dimension=dim, tiled=True)
    else:
        width = view.shape[dim] // size
        view = lax.dynamic_slice_in_dim(view, lax.axis_index(gather.axis) * width, width, dim)
    return _flattened(view, along)


def _gathered(a: Array, along: Along) -> Array:
    if not _manual(along.gather):
        a = _constrained(a, along, along.entries)
        rest = tuple(_without(entry, along.gather.axis) for entry in along.entries)
        return _constrained(a, along, rest)
    view, dim = _unflattened(a, along)
    return _flattened(lax.all_gather(view, along.gather.axis, axis=dim, tiled=True, to="invarying"), along)


def _unflattened(a: Array, along: Along) -> tuple[Array, int]:
    """The matrix with the axes before the cut one apart, so that the shards lie one after the other along it."""
    other, before = a.shape[1 - along.axis], along.lead[: along.position]
    if a.shape[along.axis] % max(math.prod(before), 1):
        raise ValueError(
            f"Gather({along.gather.axis!r}, {along.gather.spec}): a shard {along.lead} of the tokens ends within a "
            "block of the recipe; make it a multiple of the block, or use a recipe with other blocks"
        )
    shape = (*before, -1, other) if along.axis == 0 else (other, *before, -1)
    return a.reshape(shape), along.position + along.axis


def _flattened(view: Array, along: Along) -> Array:
    return view.reshape(-1, view.shape[-1]) if along.axis == 0 else view.reshape(view.shape[0], -1)


def _constrained(a: Array, along: Along, entries: tuple[Any, ...]) -> Array:
    sharding = along.gather.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    # Scales of few blocks do not divide, and matter little.
    divides = [
        n % math.prod(mesh.shape[axis] for axis in _names(e)) == 0 for n, e in zip(a.shape, entries, strict=True)
    ]
    spec = PartitionSpec(*(e if even else None for e, even in zip(entries, divides, strict=True)))
    return lax.with_sharding_constraint(a, NamedSharding(mesh, spec) if isinstance(sharding, NamedSharding) else spec)


def _refuse_whole(gather: Gather, x: Any) -> None:
    if _manual(gather) and gather.axis not in varying(x):
        raise ValueError(
            f"Gather({gather.axis!r}, {gather.spec}): the operand does not vary over that mesh axis; leave out the "
            "gather, or shard the operand over it"
        )


def _manual(gather: Gather) -> bool:
    return gather.axis in jax.sharding.get_abstract_mesh().manual_axes


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _without(entry: Any, axis: str) -> Any:
    left = tuple(name for name in _names(entry) if name != axis)
    return left or None
