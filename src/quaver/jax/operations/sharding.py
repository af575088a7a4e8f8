"""Amaxes, noise and gradients of layers with sharded arrays, and all-gathers in quantized form.

Under `jit` every array is whole, so amaxes are those of whole tensors and nothing is needed. Under `jax.shard_map`
arrays are shards. Their types say over which mesh axes they vary. That determines which GEMM axis each mesh axis
shards:

    in x and not in w    tokens      (data and sequence parallel)
    in w and not in x    outputs     (column parallel)
    in both              K           (row parallel)

So amaxes are reduced over the shards, noise depends on an element's position in the whole, and gradients are summed
over exactly the axes over which their parameter does not vary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from quaver.jax.numerics.quantized import Quantized, along, largest
from quaver.jax.numerics.rounding import rotate, widen
from quaver.jax.numerics.scaling import block_bits
from quaver.jax.operations.ops import quantize
from quaver.recipes.spec import QuantSpec

# ---- sharded GEMMs ----


class GemmMeshAxes(NamedTuple):
    """Mesh axes that shard the three axes of a linear layer's GEMMs, each in the mesh's order."""

    tokens: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def varying(*arrays: Any) -> frozenset[str]:
    """Return the mesh axes over which any of these arrays or pytrees varies."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(arrays)]
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def ordered(axes: Iterable[str]) -> tuple[str, ...]:
    """Return mesh axes in the mesh's order."""
    chosen = set(axes)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in chosen) if chosen else ()


def axes_of(
    x: Any, w: Any, state: Any = None, gathered_x: str | None = None, gathered_w: str | None = None
) -> GemmMeshAxes:
    """Return how a linear layer's GEMMs are sharded, from the types of its arguments.

    A mesh axis over which the state varies separates layers, such as pipeline stages, and does not count. Neither does
    one over which x or w is gathered first.

    Args:
        x, w, state: arguments of the layer.
        gathered_x, gathered_w: mesh axes over which x and w are gathered, or None.
    Raises:
        ValueError: inside a shard_map without type tracking (check_vma=False), or in pmap.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return GemmMeshAxes()
    if any(not varying(lax.axis_index(axis)) for axis in manual):
        raise ValueError(
            "a quantized layer runs in jax.pmap, or in a shard_map with check_vma=False, where it cannot know "
            "which arrays are shards, so its scales would differ between shards; instead of pmap use jax.jit with "
            "sharded arrays (jax.sharding.NamedSharding), or jax.shard_map with check_vma=True"
        )
    own = varying(state)
    a, b = varying(x) - own - {gathered_x}, varying(w) - own - {gathered_w}
    return GemmMeshAxes(ordered(a - b), ordered(a & b), ordered(b - a))


def quantize_shard(
    x: Array | Quantized,
    spec: QuantSpec,
    row_axes: tuple[str, ...],
    k_axes: tuple[str, ...],
    *,
    factor: Array | None = None,
    seed: int = 0,
    tensor_id: int = 0,
    count: Array | int = 0,
    axis: int = 1,
) -> Quantized:
    """`quantize` for a shard [rows, k] of an operand; returns that part of the whole's codes and scales.

    Args:
        x: the shard, [k, rows] with axis=0.
        spec: how to quantize.
        row_axes, k_axes: mesh axes that shard each of its axes.
        factor, seed, tensor_id, count, axis: as for `quantize`.
    Raises:
        ValueError: a shard ends within a block.

    Exact.
    """
    if isinstance(x, Quantized) or not (row_axes or k_axes):
        return quantize(x, spec, factor=factor, seed=seed, tensor_id=tensor_id, count=count, axis=axis)
    rows, k = along(axis, x.shape)
    _check_shard_edges((rows, k), spec, row_axes, k_axes)
    place = None
    if spec.rounding == "stochastic":
        stored = spec.padded(k)
        whole = stored * (lax.axis_size(k_axes) if k_axes else 1)
        first = [lax.axis_index(axes) * size if axes else 0 for axes, size in ((row_axes, rows), (k_axes, stored))]
        place = (first[0], first[1], whole)
    amax = shared_amax(x, spec, row_axes, k_axes, axis)
    q = quantize(x, spec, amax, factor=factor, seed=seed, tensor_id=tensor_id, count=count, place=place, axis=axis)
    return q if amax is None or q.amax is None else replace(q, amax=amax)


def shared_amax(
    x: Array, spec: QuantSpec, row_axes: tuple[str, ...], k_axes: tuple[str, ...], axis: int = 1
) -> Array | None:
    """Return the amaxes of blocks that span shards, reduced over the shards: [1, 1], [rows, 1] or [1, k].

    None if no block spans two shards.
    """
    if spec.scale == "unit":
        return None
    over = (row_axes if spec.two_level or spec.block[0] is None else ()) + (
        k_axes if spec.two_level or spec.block[1] is None else ()
    )
    if not over:
        return None
    bits = block_bits(rotate(x, axis) if spec.hadamard else widen(x), spec, axis)
    if spec.two_level:
        bits = largest(bits, (0, 1))
    elif axis == 0:
        bits = bits.T
    # Reduce as integers, so that NaN propagates.
    return lax.bitcast_convert_type(lax.pmax(bits, over), jnp.float32)


def _check_shard_edges(
    shape: tuple[int, ...], spec: QuantSpec, row_axes: tuple[str, ...], k_axes: tuple[str, ...]
) -> None:
    widths = (spec.block[0], 16 if spec.hadamard else spec.block[1])
    for axes, size, width, what in ((row_axes, shape[0], widths[0], "rows"), (k_axes, shape[1], widths[1], "columns")):
        if axes and width is not None and size % width:
            raise ValueError(
                f"{spec} shares a scale among {width} {what}, and mesh axes {axes} divide the operand into shards "
                f"of {size}: make the shard a multiple of {width}, shard another axis, or use a recipe with other "
                "blocks"
            )


def psum_like(gradient: Array, primal: Any) -> Array:
    """Sum a gradient over the mesh axes over which its primal does not vary, so that every shard has the same."""
    axes = ordered(varying(gradient) - varying(primal))
    return lax.psum(gradient, axes) if axes else gradient


def pmax_like(x: Array, like: Array) -> Array:
    """Return the maximum of x over the mesh axes over which `like` does not vary, with the type of `like`."""
    axes = ordered(varying(x) - varying(like))
    x = lax.pmax(x, axes) if axes else x
    more = ordered(varying(like) - varying(x))
    return lax.pcast(x, more, to="varying") if more else x


def partition_spec_of(x: Any) -> tuple[Any, ...]:
    """Return the sharding of each axis from an array's type, on a mesh with explicit axes; for a `Quantized`, of its
    codes [rows, k].
    """
    leaf = jax.typeof(jax.tree.leaves(x)[0])
    entries = (*leaf.sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
    return along(x.axis, entries) if isinstance(x, Quantized) else entries


def with_auto_sharding(function: Callable[..., Array], x: Any, out: tuple[Any, ...]) -> Callable[..., Array]:
    """Wrap a function so that shardings inside are left to the compiler, on a mesh with explicit axes.

    The types cannot express the sharding of blocks and flattened axes.

    Args:
        function: the function.
        x: one of its arguments, whose type knows the mesh.
        out: sharding of the output by axis; a mesh axis that occurs twice counts once.
    """
    mesh = jax.typeof(jax.tree.leaves(x)[0]).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return function
    seen: set[str] = set()
    entries = []
    for entry in out:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        entries.append(tuple(name for name in names if name not in seen) or None)
        seen.update(names)
    return jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=NamedSharding(mesh, PartitionSpec(*entries))
    )


# ---- all-gather of operands in quantized form ----
#
# Fully sharded weights (FSDP) and activations sharded along the sequence (SP) are gathered before the GEMM. Each shard
# is quantized, and codes and scales are gathered. Gathering in high precision would take two to four times the traffic
# for the same codes, since scales are reduced over the shards first. Backward gathers again, so that only shards are
# saved, and each gradient is reduce-scattered.


@dataclass(frozen=True)
class ShardedOperand:
    """An operand that is sharded over a mesh axis and gathered, in quantized form, before the GEMM.

    Args:
        axis: mesh axis to gather over.
        sharding: sharding of the operand, x [..., K] or w [K, N], or of the output [..., N]: a PartitionSpec that names
            the axis, or a NamedSharding of one. Inside shard_map it is that of the whole array, as in `in_specs`.
        overlap: send shards in a ring, and multiply each while the next one is sent; inside shard_map.
    """

    axis: str
    sharding: PartitionSpec | NamedSharding
    overlap: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not isinstance(self.sharding, (PartitionSpec, NamedSharding)):
            raise TypeError(
                "ShardedOperand takes the name of a mesh axis and a PartitionSpec or NamedSharding that names it, "
                f"not {self.axis!r} and {self.sharding!r}"
            )

    @property
    def spec(self) -> PartitionSpec:
        return self.sharding.spec if isinstance(self.sharding, NamedSharding) else self.sharding

    def position(self, ndim: int) -> int:
        """Return which axis of the operand is sharded."""
        for position, names in enumerate(tuple(self.spec)[:ndim]):
            if self.axis in _names(names):
                return position
        raise ValueError(f"{self}: the spec does not name that axis; give the operand's own spec")


class ShardPlacement(NamedTuple):
    """Position of the shards of a matrix in the whole matrix."""

    gather: ShardedOperand
    #: Axis of the matrix that is sharded.
    axis: int
    #: Shape (of a shard) of the operand's axes that were flattened into it, and which of them is sharded.
    leading_shape: tuple[int, ...]
    position: int
    #: PartitionSpec entries for the matrix's axes.
    entries: tuple[Any, Any]

    @property
    def T(self) -> "ShardPlacement":
        return ShardPlacement(
            self.gather, 1 - self.axis, self.leading_shape, self.position, (self.entries[1], self.entries[0])
        )


def weight_placement(gather: ShardedOperand | None, w: Any) -> ShardPlacement | None:
    """Return how w [K, N] is gathered, or None."""
    if gather is None:
        return None
    position, shape = gather.position(2), w.shape
    _check_sharded(gather, w)
    a, b = (*tuple(gather.spec), None, None)[:2]
    return ShardPlacement(gather, position, (shape[position],), 0, (a, b))


def input_placement(gather: ShardedOperand | None, x: Any) -> ShardPlacement | None:
    """Return how x [..., K] is gathered as a matrix [T, K], or None."""
    if gather is None:
        return None
    shape, ndim = x.shape, len(x.shape)
    position = gather.position(ndim)
    _check_sharded(gather, x)
    entries = (*tuple(gather.spec), *[None] * ndim)[:ndim]
    if position == ndim - 1:
        raise ValueError(
            f"{gather} shards x along K, which the GEMM sums over: shard w in the same way and leave out the gather"
        )
    others = [entry for i, entry in enumerate(entries[:-1]) if i != position]
    if not is_manual(gather) and (any(others) or any(n > 1 for n in shape[:position])):
        raise ValueError(
            f"{gather}: under jit, activations are gathered in eight bits along their "
            f"first axis, and here it is axis {position} of {ndim}; put the sequence first, or use shard_map"
        )
    return ShardPlacement(gather, 0, shape[:-1], position, (entries[position], entries[-1]))


def output_placement(scatter: ShardedOperand | None, shape: tuple[int, ...], features: int) -> ShardPlacement | None:
    """Return how an output [..., N] is reduce-scattered as a matrix [T, N], or None.

    Args:
        scatter: the mesh axis, and the sharding of the output.
        shape: shape of the output's leading axes before the scatter.
        features: N.
    """
    if scatter is None:
        return None
    if not is_manual(scatter):
        raise ValueError(
            f"{scatter}: an output is reduce-scattered inside jax.shard_map only; under jit, leave scatter_output out "
            "and constrain the output's sharding"
        )
    ndim = len(shape) + 1
    position, size = scatter.position(ndim), lax.axis_size(scatter.axis)
    if position == ndim - 1 or shape[position] % size:
        raise ValueError(
            f"{scatter} scatters axis {position} of an output {(*shape, features)} over {size} shards; name an axis "
            "of tokens that divides"
        )
    shard = tuple(n // size if i == position else n for i, n in enumerate(shape))
    return ShardPlacement(scatter, 0, shard, position, (None, None))


def axes_before_gather(
    placement: ShardPlacement | None, row_axes: tuple[str, ...], k_axes: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the mesh axis of the gather to the mesh axes that shard a matrix after it, for the matrix before the
    gather.
    """
    if placement is None or not is_manual(placement.gather):
        return row_axes, k_axes
    own = (placement.gather.axis,)
    return (row_axes + own, k_axes) if placement.axis == 0 else (row_axes, k_axes + own)


def all_gather_operand(q: Quantized | Array, placement: ShardPlacement | None) -> Any:
    """Return the gathered operand: codes and scales, or the array if it is not quantized.

    Args:
        q: the operand.
        placement: that of the shards of an array, or of a `Quantized` [rows, k].
    """
    if placement is None:
        return q
    if not isinstance(q, Quantized):
        return _gathered(q, placement)
    stored = placement if q.axis == 1 else placement.T
    # Gather bytes: XLA on a CPU would send float8 as float16.
    data = lax.bitcast_convert_type(_gathered(lax.bitcast_convert_type(q.data, jnp.uint8), stored), q.data.dtype)
    # A block that spans all shards has the same scale on each.
    scale = q.scale if q.spec.block[placement.axis] is None else _gathered(q.scale, stored)
    return replace(q, data=data, scale=scale, shape=gathered_shape(q.shape, placement))


def gathered_array(a: Array, placement: ShardPlacement | None) -> Array:
    """All-gather an unquantized array [..., features] inside shard_map, differentiable; under jit XLA does it."""
    if placement is None or not is_manual(placement.gather):
        return a
    axis, position = placement.gather.axis, placement.gather.position(a.ndim)
    return lax.all_gather(a, axis, axis=position, tiled=True, to="invarying")


def without_overlap(placement: ShardPlacement | None) -> ShardPlacement | None:
    """Return a placement whose collective is not a ring."""
    if placement is None or not placement.gather.overlap:
        return placement
    return placement._replace(gather=replace(placement.gather, overlap=False))


def gathered_shape(shape: tuple[int, int], placement: ShardPlacement | None) -> tuple[int, int]:
    """Return the shape of a matrix after the gather, from that of a shard."""
    if placement is None or not is_manual(placement.gather):
        return shape
    size = lax.axis_size(placement.gather.axis)
    return (shape[0] * size, shape[1]) if placement.axis == 0 else (shape[0], shape[1] * size)


def scattered_leading_shape(leading_shape: tuple[int, ...], placement: ShardPlacement | None) -> tuple[int, ...]:
    """Return the leading axes of the output after the scatter."""
    return leading_shape if placement is None else placement.leading_shape


def gathered_leading_shape(leading_shape: tuple[int, ...], placement: ShardPlacement | None) -> tuple[int, ...]:
    """Return the leading axes of x after the gather, from those of a shard."""
    if placement is None or not is_manual(placement.gather):
        return leading_shape
    size = lax.axis_size(placement.gather.axis)
    return tuple(n * size if i == placement.position else n for i, n in enumerate(leading_shape))


def shard_of_gradient(gradient: Array, placement: ShardPlacement | None) -> Array:
    """Return this shard's part of a gradient, reduced over the mesh axis if shards hold partial sums."""
    if placement is None:
        return gradient
    gather = placement.gather
    if not is_manual(gather):
        return _constrained(gradient, placement, placement.entries)
    size = lax.axis_size(gather.axis)
    view, dim = unflattened(gradient, placement)
    if gather.axis in jax.typeof(view).manual_axis_type.varying:
        view = lax.psum_scatter(view, gather.axis, scatter_dimension=dim, tiled=True)
    else:
        width = view.shape[dim] // size
        view = lax.dynamic_slice_in_dim(view, lax.axis_index(gather.axis) * width, width, dim)
    return flattened(view, placement)


def _gathered(a: Array, placement: ShardPlacement) -> Array:
    if not is_manual(placement.gather):
        a = _constrained(a, placement, placement.entries)
        rest = tuple(_without(entry, placement.gather.axis) for entry in placement.entries)
        return _constrained(a, placement, rest)
    view, dim = unflattened(a, placement)
    return flattened(lax.all_gather(view, placement.gather.axis, axis=dim, tiled=True, to="invarying"), placement)


def unflattened(a: Array, placement: ShardPlacement) -> tuple[Array, int]:
    """Split off the axes before the sharded axis, so that each shard is one contiguous range of the rest.

    Returns the view, and the index of the sharded axis in it."""
    other, before = a.shape[1 - placement.axis], placement.leading_shape[: placement.position]
    if a.shape[placement.axis] % max(math.prod(before), 1):
        raise ValueError(
            f"{placement.gather}: a shard {placement.leading_shape} of the tokens ends within a "
            "block of the recipe; make it a multiple of the block, or use a recipe with other blocks"
        )
    shape = (*before, -1, other) if placement.axis == 0 else (other, *before, -1)
    return a.reshape(shape), placement.position + placement.axis


def flattened(view: Array, placement: ShardPlacement) -> Array:
    return view.reshape(-1, view.shape[-1]) if placement.axis == 0 else view.reshape(view.shape[0], -1)


def _constrained(a: Array, placement: ShardPlacement, entries: tuple[Any, ...]) -> Array:
    sharding = placement.gather.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    # Scales of few blocks may not divide by the mesh axis; they are small, so leave them unsharded.
    divides = [
        n % math.prod(mesh.shape[axis] for axis in _names(e)) == 0 for n, e in zip(a.shape, entries, strict=True)
    ]
    spec = PartitionSpec(*(e if even else None for e, even in zip(entries, divides, strict=True)))
    return lax.with_sharding_constraint(a, NamedSharding(mesh, spec) if isinstance(sharding, NamedSharding) else spec)


def _check_sharded(gather: ShardedOperand, x: Any) -> None:
    if is_manual(gather) and gather.axis not in varying(x):
        raise ValueError(
            f"{gather}: the operand does not vary over that mesh axis; leave out the "
            "gather, or shard the operand over it"
        )


def is_manual(gather: ShardedOperand) -> bool:
    return gather.axis in jax.sharding.get_abstract_mesh().manual_axes


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _without(entry: Any, axis: str) -> Any:
    left = tuple(name for name in _names(entry) if name != axis)
    return left or None
