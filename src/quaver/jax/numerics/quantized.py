"""`Quantized`, the pytree of a quantized operand; lax helpers, packing, block helpers and argument checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.recipes.formats import Format
from quaver.recipes.spec import Block, QuantSpec
from quaver.reference import numerics
from quaver.reference.numerics import NAN_CODE

# ---- elementwise operations written in `jax.lax` primitives ----
#
# A jax.numpy function, including operators between arrays, is a program of its own. For a new shape it takes four times
# as long to trace as a primitive and twice as long to lower. Code on every operand's path therefore uses primitives.
# These require operands of one dtype, and of one rank unless one is a scalar. Scalars are numpy's of that dtype,
# because Python's have 64 bits under `jax_enable_x64`.


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """Return x where the condition is True, else y. Exact.

    Args:
        condition: bool, of the result's rank, or a scalar; axes of length one are broadcast.
        x, y: scalars, or arrays of the result's shape; at least one array.
    """
    like = x if _is_array(x) else y
    assert isinstance(like, Array)
    if condition.shape not in ((), like.shape):
        condition = lax.broadcast_in_dim(condition, like.shape, range(like.ndim))
    x, y = (one if _is_array(one) else lax.full_like(like, one) for one in (x, y))
    return lax.select(condition, x, y)


def _is_array(x: object) -> bool:
    return isinstance(x, (Array, np.ndarray))


def isnan(x: Array) -> Array:
    """Return True for each NaN. Exact."""
    return lax.ne(x, x)


def copysign(magnitude: Array, y: Array) -> Array:
    """Return non-negative float32 magnitudes with the signs of float32 y. Exact."""
    bits = lax.bitcast_convert_type(magnitude, np.uint32)
    sign = lax.bitwise_and(lax.bitcast_convert_type(y, np.uint32), np.uint32(0x80000000))
    return lax.bitcast_convert_type(lax.bitwise_or(bits, sign), np.float32)


def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """Return the maximum of int32 x and 0 over these axes, which stay with length one. Exact."""
    retained = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return lax.reshape(lax.max(lax.reduce_max(x, axes), np.int32(0)), retained)


def padded(x: Array, *after: int) -> Array:
    """Append this many zeros to each axis. Exact."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, more, 0) for more in after]) if any(after) else x


def computed_once(x: Any) -> Any:
    """Return an array or a pytree of arrays whose elements are computed once, however often a program reads them.

    XLA's CPU fusions cross optimization barriers and compute an element again for each read. They stop at a
    conditional, and the barrier hides from the compiler that its condition is constant.
    """

    def fenced(x: Any) -> Any:
        def zeros(x: Any) -> Any:
            return jax.tree.map(lambda leaf: lax.mul(leaf, np.zeros((), leaf.dtype)), x)

        return lax.cond(lax.optimization_barrier(np.True_), lambda x: x, zeros, x)

    def barred(x: Any) -> Any:
        # One each: a barrier of several arrays varies over the mesh axes of all of them.
        return jax.tree.map(lax.optimization_barrier, x)

    return lax.platform_dependent(x, cpu=fenced, default=barred)


def without_elements(x: Array) -> Array:
    """Return x with a last axis of length zero, which carries only its dtype and sharding type."""
    return lax.slice_in_dim(x, 0, 0, axis=-1)


# ---- Quantized ----

#: Formats with a float8 dtype. Other formats store uint8 codes; two E2M1 codes share a byte, the even k in the lower
#: nibble.
FLOAT8: dict[str, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale", "tensor_factor", "amax"],
    meta_fields=["spec", "shape", "axis"],
)
@dataclass(frozen=True, eq=False)
class Quantized:
    """A GEMM operand [rows, k] in 8 or 4 bits: original ≈ data × scale.

    Its arrays are stored with k last, or with k first (`axis` 0), so that a matrix is quantized along either of its
    axes without a transpose. `codes`, `scales`, `values` and `dequantize` return [rows, k] in both layouts.

    Invariants: rows and k include the Hadamard's padding; an infinity or NaN in the original makes its scale NaN.
    """

    #: Codes [rows, k] in a float8 dtype, uint8 [rows, ceil(k / 2)] for E2M1, or uint8 [rows, k] for other formats; with
    #: its axes swapped if `axis` is 0.
    data: Array
    #: Decode scales [row blocks, k blocks], their axes swapped as those of data: float32, or uint8 exponents (E8M0), or
    #: uint8 E4M3 codes (two-level).
    scale: Array
    #: Two-level only: tensor factor by which block scales are divided, float32 [1, 1], NaN for a non-finite tensor.
    #: Dividing rounds once; a stored reciprocal would round twice.
    tensor_factor: Array | None
    #: Amax of the tensor, float32 [1, 1], if it has one scale; recorded by a history.
    amax: Array | None
    spec: QuantSpec = field(metadata={"static": True})
    #: (rows, k).
    shape: tuple[int, int] = field(metadata={"static": True})
    #: Axis of data and scale that is k, the contraction axis: 1 or 0.
    axis: int = field(default=1, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(x.size * x.dtype.itemsize for x in (self.data, self.scale, self.tensor_factor) if x is not None)

    @property
    def T(self) -> "Quantized":
        """The transpose [k, rows], in the other layout; only for specs with square blocks."""
        if not self.spec.transposable:
            raise ValueError(f"{self.spec} has no transpose, its blocks are not square; quantize the transpose instead")
        data, (rows, k) = self.data, self.shape
        if self.spec.format.packed:
            data = pack(unpack(data, k, self.axis), 1 - self.axis)
        return replace(self, data=data, shape=(k, rows), axis=1 - self.axis)

    def with_k_last(self) -> "Quantized":
        """Return the same operand stored with k last; transposes the codes if they are not."""
        if self.axis == 1:
            return self
        return replace(self, data=self.data.T, scale=self.scale.T, axis=1)

    @property
    def stored_block(self) -> Block:
        """The block along the two axes of the stored arrays."""
        return along(self.axis, self.spec.block)

    def codes(self) -> Array:
        """Return one uint8 code per element [rows, k], with every NaN as 0x7F."""
        fmt, data = self.spec.format, self.with_k_last().data
        if fmt.packed:
            return unpack(data, self.shape[1])
        if fmt.name not in FLOAT8:
            return data
        codes = lax.bitcast_convert_type(data, jnp.uint8)
        # NaN codes are those above infinity's; E4M3 has no infinity, and its NaN is 0x7F.
        last = (fmt.emax + fmt.bias << fmt.mantissa_bits) + (fmt.max_mantissa >> 23 - fmt.mantissa_bits)
        nan = lax.gt(lax.bitwise_and(codes, np.uint8(0x7F)), np.uint8(last if fmt.name == "e4m3" else last + 1))
        return where(nan, NAN_CODE, codes)

    def scales(self) -> Array:
        """Return float32 decode scales [row blocks, k blocks], with both levels multiplied."""
        scales = self.stored_scales()
        return scales if self.axis == 1 else scales.T

    def stored_scales(self) -> Array:
        """Return `scales` in the stored layout."""
        if self.spec.scale == "e8m0":
            bits = self.scale.astype(jnp.int32)
            # Code 0 is 2**-127, a float32 subnormal with one mantissa bit set. Code 255 is NaN.
            wide = where(lax.eq(bits, np.int32(255)), 0x7FC00000, lax.shift_left(bits, np.int32(23)))
            wide = where(lax.eq(bits, np.int32(0)), 0x00400000, wide)
            return lax.bitcast_convert_type(wide, jnp.float32)
        if self.spec.two_level:
            assert self.tensor_factor is not None
            blocks = lax.bitcast_convert_type(self.scale, jnp.float8_e4m3fn).astype(jnp.float32)
            # Broadcast the divisor behind a barrier: XLA would multiply by the reciprocal of a scalar.
            factor = lax.broadcast_in_dim(self.tensor_factor, blocks.shape, (0, 1))
            return lax.div(blocks, lax.optimization_barrier(factor))
        return self.scale

    def values(self, dtype: Any = jnp.float32) -> Array:
        """Return the data [rows, k] without the scales."""
        values = self.stored_values(dtype)
        return values if self.axis == 1 else values.T

    def stored_values(self, dtype: Any = jnp.float32) -> Array:
        """Return `values` in the stored layout."""
        fmt = self.spec.format
        # Without the barrier, XLA on a GPU removes a cast to FP8 and back, and with it the rounding. Where packing and
        # unpacking are in one program, it would recompute every code for each use.
        data = lax.optimization_barrier(self.data)
        if fmt.packed:
            return e2m1_values(unpack(data, self.shape[1], self.axis), dtype)
        return data.astype(dtype) if fmt.name in FLOAT8 else values_of(data, fmt, dtype)

    def dequantize(self) -> Array:
        """Return float32 [rows, k]: data × scale. After a Hadamard these are the rotated values, as the GEMM sees
        them.
        """
        return scale_blocks(self.values(), self.scales(), self.spec.block)


def along(axis: int, pair: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a pair for (rows, k) in the order of the axes of an array whose contraction axis is this one, or back."""
    rows, k = pair
    return (rows, k) if axis == 1 else (k, rows)


def as_bytes(retained: Any) -> Any:
    """Convert the float8 codes in a pytree to uint8, for saving between forward and backward.

    `jax.checkpoint` rounds saved floats to their own type by IEEE rules, which would turn E4M3's 256 to 448 into
    infinity.
    """

    def one(leaf: Any) -> Any:
        return lax.bitcast_convert_type(leaf, jnp.uint8) if leaf.dtype in _FLOAT8 else leaf

    return jax.tree.map(one, retained)


def as_codes(retained: Any) -> Any:
    """Undo `as_bytes`."""

    def one(node: Any) -> Any:
        if not isinstance(node, Quantized) or node.spec.format.name not in FLOAT8:
            return node
        return replace(node, data=lax.bitcast_convert_type(node.data, FLOAT8[node.spec.format.name]))

    return jax.tree.map(one, retained, is_leaf=lambda node: isinstance(node, Quantized))


_FLOAT8 = tuple(FLOAT8.values())


def scale_blocks(x: Array, factor: Array, block: Block) -> Array:
    """Multiply the elements of each block of a matrix by the block's factor."""
    rows, columns = x.shape
    if x.size == 0:
        return x
    if block in ((None, None), (1, None), (None, 1)):
        return lax.mul(x, factor)
    if 1 not in block:
        # One factor per column: XLA on a CPU vectorizes along the last axis, unless blocks divide it.
        factor, block = computed_once(_expanded(factor, block[1], columns)), (block[0], 1)
    view, within = blocked(x, block)
    y = lax.mul(view, lax.expand_dims(factor, within))
    return cut(y.reshape(*_padded_shape(x, block)), rows, columns)


def _expanded(factor: Array, block: int | None, columns: int) -> Array:
    """Expand factors of column blocks to one per column."""
    (rows, blocks), each = factor.shape, _within(block, columns)
    wide = lax.broadcast_in_dim(factor, (rows, blocks, each), (0, 1)).reshape(rows, blocks * each)
    return cut(wide, rows, columns)


def blocked(x: Array, block: Block) -> tuple[Array, tuple[int, ...]]:
    """Return a non-empty matrix as [row blocks, rows, column blocks, columns], zero-padded, and its axes within blocks.

    A block's axis of length one is left out: XLA on a CPU vectorizes along the last axis.
    """
    br, bk = _within(block[0], x.shape[0]), _within(block[1], x.shape[1])
    rows, columns = _padded_shape(x, block)
    x = padded(x, rows - x.shape[0], columns - x.shape[1])
    if block[1] == 1:
        return x.reshape(rows // br, br, columns), (1,)
    if block[0] == 1:
        return x.reshape(rows, columns // bk, bk), (2,)
    return x.reshape(rows // br, br, columns // bk, bk), (1, 3)


def _padded_shape(x: Array, block: Block) -> tuple[int, int]:
    br, bk = _within(block[0], x.shape[0]), _within(block[1], x.shape[1])
    return -(-x.shape[0] // br) * br, -(-x.shape[1] // bk) * bk


def _within(block: int | None, length: Any) -> Any:
    """Return the length of a block on an axis. An axis of symbolic length (`jax.export`) is padded to whole blocks."""
    if block is None:
        return length
    return min(block, length) if isinstance(length, int) else block


def cut(x: Array, rows: int, k: int) -> Array:
    """Return the first rows and columns of a matrix."""
    return x if x.shape == (rows, k) else lax.slice(x, (0, 0), (rows, k))


def pack(codes: Array, axis: int = 1) -> Array:
    """Pack two 4-bit codes per byte along an axis: uint8 [rows, k] to [rows, ceil(k / 2)], or [k, rows] likewise."""
    rows, k = along(axis, codes.shape)
    codes, half = padded(codes, *along(axis, (0, k % 2))), (k + 1) // 2
    if _neighbours_are_words(codes, axis):
        words = lax.bitcast_convert_type(codes.reshape(rows, half, 2), jnp.uint16)
        return lax.bitwise_or(words, lax.shift_right_logical(words, np.uint16(4))).astype(jnp.uint8)
    pairs = codes.reshape((rows, half, 2) if axis == 1 else (half, 2, rows))
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return lax.bitwise_or(low, lax.shift_left(high, np.uint8(4)))


def unpack(packed: Array, k: int, axis: int = 1) -> Array:
    """Unpack uint8 [rows, ceil(k / 2)] to one code per element, [rows, k], or the same with the axes swapped."""
    rows, half = along(axis, packed.shape)
    if _neighbours_are_words(packed, axis):
        words = packed.astype(jnp.uint16)
        words = lax.bitwise_and(lax.bitwise_or(words, lax.shift_left(words, np.uint16(4))), np.uint16(0x0F0F))
        return cut(lax.bitcast_convert_type(words, jnp.uint8).reshape(rows, 2 * half), rows, k)
    # No broadcast of the bytes: XLA's partitioner passes shardings through it only after the GEMM's, and would then
    # gather the decoded operand over the shards of its contraction axis.
    byte = lax.expand_dims(packed, (axis + 1,))
    low, high = lax.bitwise_and(byte, np.uint8(15)), lax.shift_right_logical(byte, np.uint8(4))
    whole = lax.concatenate([low, high], axis + 1).reshape(along(axis, (rows, 2 * half)))
    return cut(whole, *along(axis, (rows, k)))


def _neighbours_are_words(codes: Array, axis: int) -> bool:
    """Return True to read two neighbours on the last axis as one 16-bit number.

    XLA on a CPU vectorizes that, and an NVFP4 layer takes two thirds of the time. It does not vectorize a stride of
    two. JAX exports no such reading of an axis of symbolic length.
    """
    return axis == 1 and all(isinstance(size, int) for size in codes.shape)


def e2m1_values(codes: Array, dtype: Any) -> Array:
    """Return the values of E2M1 codes, built from bfloat16 bits."""
    code = codes.astype(jnp.uint16)
    magnitude = lax.bitwise_and(code, np.uint16(7))
    # 1/2 is a subnormal of the format; the others are normal numbers with one mantissa bit.
    normal = lax.add(lax.shift_left(magnitude, np.uint16(6)), np.uint16(0x3F00))
    bits = where(lax.eq(magnitude, np.uint16(1)), 0x3F00, normal)
    bits = where(lax.eq(magnitude, np.uint16(0)), 0, bits)
    sign = lax.shift_left(lax.bitwise_and(code, np.uint16(8)), np.uint16(12))
    return lax.bitcast_convert_type(lax.bitwise_or(bits, sign), jnp.bfloat16).astype(dtype)


def values_of(codes: Array, fmt: Format, dtype: Any) -> Array:
    """Look up the values of a format's codes, one per byte."""
    return jnp.asarray(numerics.values(fmt)).astype(dtype)[codes.astype(jnp.int32)]


# ---- validation of user arguments, before JAX raises its own errors ----


def array(label: str, argument: str, value: Any) -> Array:
    """Return value as an array of real numbers; accepts numpy arrays and NNX Variables.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{label}: {argument} is a {type(value).__name__}; give an array, such as jax.numpy.asarray({argument})"
        )
    real = jnp.issubdtype(value.dtype, np.number) and not jnp.issubdtype(value.dtype, np.complexfloating)
    if not real and value.dtype != np.bool_:
        raise TypeError(f"{label}: {argument} is an array of {value.dtype}; give one of real numbers")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def checked_float_dtype(label: str, dtype: Any) -> Any:
    """Return a floating-point dtype. Raises: ValueError if it is not one."""
    try:
        own = None if isinstance(dtype, (jax.Array, np.ndarray)) else jnp.dtype(dtype)
    except (TypeError, ValueError):
        own = None
    if own is None or not jnp.issubdtype(own, jnp.floating):
        shown = repr(dtype) if own is None else own
        raise ValueError(f"{label} computes in a floating dtype, not {shown}; convert x, or give dtype=jnp.float32")
    return own


def checked_state(label: str, state: Any) -> dict[str, Any]:
    """Return a layer's state as a new dict; {} for None. Raises: TypeError if it is not a dict of arrays."""
    if state is None:
        return {}
    if not isinstance(state, Mapping) or not all(hasattr(leaf, "dtype") for leaf in state.values()):
        raise TypeError(
            f"{label}: state is a {type(state).__name__} and should be a dict of arrays, as "
            "quaver.jax.state.init(recipe) makes it and the state's gradient returns it"
        )
    return dict(state)
