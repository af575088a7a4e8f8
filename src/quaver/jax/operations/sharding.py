"""Amaxes, noise and gradients of layers whose arrays are sharded.

Under `jit` every array is whole: an amax is the whole tensor's by itself, and there is nothing to do. Under
`jax.shard_map` arrays are pieces; over which mesh axes they vary is part of their types, and that says which axis of
the GEMM each mesh axis cuts:

    in x and not in w    tokens      (data and sequence parallel)
    in w and not in x    outputs     (column parallel)
    in both              K           (row parallel)

So amaxes agree over the pieces, noise depends on an element's place in the whole, and gradients are summed over just
the axes that their parameter does not vary over.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from quaver.core.spec import QuantSpec
from quaver.jax.numerics.elementwise import largest
from quaver.jax.numerics.hadamard import rotate
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.numerics.rounding import widen
from quaver.jax.numerics.scaling import block_bits
from quaver.jax.operations.ops import quantize


class Axes(NamedTuple):
    """Mesh axes that cut the three axes of a linear layer's GEMMs, each in the mesh's order."""

    tokens: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def varying(*arrays: Any) -> frozenset[str]:
    """The mesh axes over which any of these arrays (or pytrees of them) differs from shard to shard."""
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(arrays)]
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def ordered(axes: Iterable[str]) -> tuple[str, ...]:
    """Mesh axes in the mesh's order."""
    chosen = set(axes)
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in chosen) if chosen else ()


def axes_of(x: Any, w: Any, state: Any = None, gathered_x: str | None = None, gathered_w: str | None = None) -> Axes:
    """How a linear layer is cut, from the types of what it is given.

    An axis over which the layer's state varies separates layers, such as the stages of a pipeline, and cuts nothing;
    nor does one over which x or w is gathered first.
    Raises:
        ValueError: inside a shard_map that does not keep track (check_vma=False).
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return Axes()
    if any(not varying(lax.axis_index(axis)) for axis in manual):
        raise ValueError(
            "a quantized layer runs in jax.pmap, or in a shard_map with check_vma=False, where nothing tells which "
            "arrays are pieces of a whole, so that its scales would differ from shard to shard; in place of pmap use "
            "jax.jit with sharded arrays (jax.sharding.NamedSharding), or jax.shard_map with check_vma left at True"
        )
    own = varying(state)
    a, b = varying(x) - own - {gathered_x}, varying(w) - own - {gathered_w}
    return Axes(ordered(a - b), ordered(a & b), ordered(b - a))


def quantize_piece(
    x: Array | Quantized,
    spec: QuantSpec,
    rows: tuple[str, ...],
    k: tuple[str, ...],
    *,
    factor: Array | None = None,
    seed: int = 0,
    tensor_id: int = 0,
    count: Array | int = 0,
) -> Quantized:
    """`quantize` for a shard [rows, k] of an operand that mesh axes cut: the codes and scales of the whole's part.

    Args:
        x: the shard.
        rows, k: the mesh axes that cut each of its axes.
    Raises:
        ValueError: a shard's edge lies within a block.
    Exact.
    """
    if isinstance(x, Quantized) or not (rows or k):
        return quantize(x, spec, factor=factor, seed=seed, tensor_id=tensor_id, count=count)
    _refuse_cuts(x.shape, spec, rows, k)
    place = None
    if spec.rounding == "stochastic":
        stored = spec.padded(x.shape[1])
        whole = stored * (lax.axis_size(k) if k else 1)
        first = [lax.axis_index(axes) * size if axes else 0 for axes, size in ((rows, x.shape[0]), (k, stored))]
        place = (first[0], first[1], whole)
    amax = shared_amax(x, spec, rows, k)
    q = quantize(x, spec, amax, factor=factor, seed=seed, tensor_id=tensor_id, count=count, place=place)
    if amax is None or q.amax is None:
        return q
    return Quantized(q.data, q.scale, q.tensor_factor, amax, q.spec, q.shape)


def shared_amax(x: Array, spec: QuantSpec, rows: tuple[str, ...], k: tuple[str, ...]) -> Array | None:
    """The largest magnitudes of the whole operand's blocks that reach over shards, [1, 1] or [rows, 1] or [1, k]; None
    where every block lies within one."""
    if spec.scale == "unit":
        return None
    over = (rows if spec.two_level or spec.block[0] is None else ()) + (
        k if spec.two_level or spec.block[1] is None else ()
    )
    if not over:
        return None
    bits = block_bits(rotate(x) if spec.hadamard else widen(x), spec)
    if spec.two_level:
        bits = largest(bits, (0, 1))
    # As integers, so that a NaN anywhere is seen everywhere.
    return lax.bitcast_convert_type(lax.pmax(bits, over), jnp.float32)


def _refuse_cuts(shape: tuple[int, ...], spec: QuantSpec, rows: tuple[str, ...], k: tuple[str, ...]) -> None:
    widths = (spec.block[0], 16 if spec.hadamard else spec.block[1])
    for axes, size, width, what in ((rows, shape[0], widths[0], "rows"), (k, shape[1], widths[1], "columns")):
        if axes and width is not None and size % width:
            raise ValueError(
                f"{spec} shares a scale among {width} {what}, and mesh axes {axes} cut the operand into shards of "
                f"{size}: make the shard a multiple of {width}, shard another axis, or use a recipe with other blocks"
            )


def sum_like(gradient: Array, primal: Any) -> Array:
    """A gradient summed over the mesh axes that its primal does not vary over: there every shard has the same one."""
    axes = ordered(varying(gradient) - varying(primal))
    return lax.psum(gradient, axes) if axes else gradient


def max_like(x: Array, like: Array) -> Array:
    """The maximum of x over the mesh axes that `like` does not vary over, with the type of `like`."""
    axes = ordered(varying(x) - varying(like))
    x = lax.pmax(x, axes) if axes else x
    more = ordered(varying(like) - varying(x))
    return lax.pcast(x, more, to="varying") if more else x


def spec_of(x: Any) -> tuple[Any, ...]:
    """The sharding that an array's type gives for each axis on a mesh with explicit axes; for a quantized operand,
    that of its codes [rows, k] as they lie."""
    leaf = jax.typeof(jax.tree.leaves(x)[0])
    return (*leaf.sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]


def shardings_inferred(function: Callable[..., Array], x: Any, out: tuple[Any, ...]) -> Callable[..., Array]:
    """The function with shardings left to the compiler inside it, on a mesh whose axes are explicit.

    Blocks and flattened axes have no sharding that a type could express.
    Args:
        x: one of its arguments, whose type knows the mesh.
        out: the output's sharding by axis; a mesh axis that comes twice counts once.
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
