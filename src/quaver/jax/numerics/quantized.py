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
    meta_fields=["spec", "shape"],
)
@dataclass(frozen=True, eq=False)
class Quantized:
    """A GEMM operand [rows, k] in 8 or 4 bits: original ≈ data × scale.

    Invariants: rows and k include the Hadamard's padding; an infinity or NaN in the original makes its scale NaN.
    """

    #: Codes [rows, k] in a float8 dtype, uint8 [rows, ceil(k / 2)] for E2M1, or uint8 [rows, k] for other formats.
    data: Array
    #: Decode scales [row blocks, k blocks]: float32, or uint8 exponents (E8M0), or uint8 E4M3 codes (two-level).
    scale: Array
    #: Two-level only: tensor factor by which block scales are divided, float32 [1, 1], NaN for a non-finite tensor.
    #: Dividing rounds once; a stored reciprocal would round twice.
    tensor_factor: Array | None
    #: Amax of the tensor, float32 [1, 1], if it has one scale; recorded by a history.
    amax: Array | None
    spec: QuantSpec = field(metadata={"static": True})
    #: (rows, k).
    shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(x.size * x.dtype.itemsize for x in (self.data, self.scale, self.tensor_factor) if x is not None)

    @property
    def T(self) -> "Quantized":
        """The transpose [k, rows]; only for specs with square blocks."""
        if not self.spec.transposable:
            raise ValueError(f"{self.spec} has no transpose, its blocks are not square; quantize the transpose instead")
        rows, k = self.shape
        data = pack(unpack(self.data, k).T) if self.spec.format.packed else self.data.T
        return Quantized(data, self.scale.T, self.tensor_factor, self.amax, self.spec, (k, rows))

    def codes(self) -> Array:
        """Return one uint8 code per element [rows, k], with every NaN as 0x7F."""
        fmt = self.spec.format
        if fmt.packed:
            return unpack(self.data, self.shape[1])
        if fmt.name not in FLOAT8:
            return self.data
        codes = lax.bitcast_convert_type(self.data, jnp.uint8)
        # NaN codes are those above infinity's; E4M3 has no infinity, and its NaN is 0x7F.
        last = (fmt.emax + fmt.bias << fmt.mantissa_bits) + (fmt.max_mantissa >> 23 - fmt.mantissa_bits)
        nan = lax.gt(lax.bitwise_and(codes, np.uint8(0x7F)), np.uint8(last if fmt.name == "e4m3" else last + 1))
        return where(nan, NAN_CODE, codes)

    def scales(self) -> Array:
        """Return float32 decode scales [row blocks, k blocks], with both levels multiplied."""
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
        fmt = self.spec.format
        # Without the barrier, XLA on a GPU removes a cast to FP8 and back, and with it the rounding. Where packing and
        # unpacking are in one program, it would recompute every code for each use.
        data = lax.optimization_barrier(self.data)
        if fmt.packed:
            return e2m1_values(unpack(data, self.shape[1]), dtype)
        return data.astype(dtype) if fmt.name in FLOAT8 else values_of(data, fmt, dtype)

    def dequantize(self) -> Array:
        """Return float32 [rows, k]: data × scale. After a Hadamard these are the rotated values, as the GEMM sees
        them.
        """
        return scale_blocks(self.values(), self.scales(), self.spec.block)


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
    """Multiply the elements of each block of x [rows, k] by the block's factor."""
    rows, k = x.shape
    if x.size == 0:
        return x
    if block in ((None, None), (1, None), (None, 1)):
        return lax.mul(x, factor)
    view = blocked(x, block)
    y = lax.mul(view, lax.expand_dims(factor, (1, 3)))
    return cut(y.reshape(view.shape[0] * view.shape[1], -1), rows, k)


def blocked(x: Array, block: Block) -> Array:
    """Reshape a non-empty matrix to [row blocks, rows, k blocks, k], zero-padded."""
    rows, k = x.shape
    br, bk = _within(block[0], rows), _within(block[1], k)
    nr, nk = -(-rows // br), -(-k // bk)
    return padded(x, nr * br - rows, nk * bk - k).reshape(nr, br, nk, bk)


def _within(block: int | None, length: Any) -> Any:
    """Return the length of a block on an axis. An axis of symbolic length (`jax.export`) is padded to whole blocks."""
    if block is None:
        return length
    return min(block, length) if isinstance(length, int) else block


def cut(x: Array, rows: int, k: int) -> Array:
    """Return the first rows and columns of a matrix."""
    return x if x.shape == (rows, k) else lax.slice(x, (0, 0), (rows, k))


def pack(codes: Array) -> Array:
    """Pack two 4-bit codes per byte: uint8 [rows, k] to [rows, ceil(k / 2)]."""
    rows, k = codes.shape
    pairs = padded(codes, 0, k % 2).reshape(rows, (k + 1) // 2, 2)
    low, high = (lax.index_in_dim(pairs, i, 2, keepdims=False) for i in (0, 1))
    return lax.bitwise_or(low, lax.shift_left(high, np.uint8(4)))


def unpack(packed: Array, k: int) -> Array:
    """Unpack uint8 [rows, ceil(k / 2)] to one code per element, [rows, k]."""
    rows, half = packed.shape
    byte = lax.reshape(packed, (rows, half, 1))
    # No broadcast of the bytes: XLA's partitioner passes shardings through it only after the GEMM's, and would then
    # gather the decoded operand over the shards of its contraction axis.
    low, high = lax.bitwise_and(byte, np.uint8(15)), lax.shift_right_logical(byte, np.uint8(4))
    return cut(lax.concatenate([low, high], 2).reshape(rows, 2 * half), rows, k)


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
