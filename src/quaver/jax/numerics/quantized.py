"""The one container of quantized data, a pytree, and how its bytes are laid out."""

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

# ---- elementwise -----------------------------------------------------------------------------------------
# Operations on all elements that `jax.lax` lacks, made of its primitives alone.
#
# A function of jax.numpy, and so an operator between two arrays, is a program within the program: of a shape that is
# new it takes four times as long to trace as a primitive of `jax.lax`, and twice as long to lower. What every operand
# passes through is written in primitives; they ask for operands of one dtype, and of one rank unless one of them is a
# number. A number is numpy's, of that dtype: Python's has 64 bits where `jax_enable_x64` is set.


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """x where the condition holds, else y: numbers, or arrays of the result's shape, one at least. Exact.

    Args:
        condition: bool, of the result's rank, or one for all; axes of length one are repeated.
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
    """True for each NaN. Exact."""
    return lax.ne(x, x)


def copysign(magnitude: Array, y: Array) -> Array:
    """float32 magnitudes, which are no negative numbers, with the signs of float32 y. Exact."""
    bits = lax.bitcast_convert_type(magnitude, np.uint32)
    sign = lax.bitwise_and(lax.bitcast_convert_type(y, np.uint32), np.uint32(0x80000000))
    return lax.bitcast_convert_type(lax.bitwise_or(bits, sign), np.float32)


def largest(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest int32, at least 0, over these axes, which stay with length one. Exact."""
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    return lax.reshape(lax.max(lax.reduce_max(x, axes), np.int32(0)), kept)


def padded(x: Array, *after: int) -> Array:
    """x with so many zeros after the end of each axis. Exact."""
    return lax.pad(x, np.zeros((), x.dtype), [(0, more, 0) for more in after]) if any(after) else x


def without_elements(x: Array) -> Array:
    """x with a last axis of length zero: what knows its dtype and its place on a mesh."""
    return lax.slice_in_dim(x, 0, 0, axis=-1)


# ---- quantized -------------------------------------------------------------------------------------------

#: Formats that codes are cast to. Those of others are bytes; two E2M1 codes share one, the lower nibble being the even
#: index of k.
FLOAT8: dict[str, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale", "tensor_factor", "amax"],
    meta_fields=["spec", "shape"],
)
@dataclass(frozen=True, eq=False)
class Quantized:
    """A GEMM operand [rows, k] in eight or four bits: original ≈ data × scale.

    Always: rows and k count codes, the Hadamard's padding included; an infinity or NaN in the original makes its scale
    NaN.
    """

    #: [rows, k] in a float8 dtype, uint8 [rows, ceil(k / 2)] for E2M1, or uint8 [rows, k] for other formats.
    data: Array
    #: Decode scales [blocks of rows, blocks of k]: float32, or uint8 exponents (E8M0), or uint8 E4M3 codes (two-level).
    scale: Array
    #: Two-level only: what the blocks' scales are divided by, float32 [1, 1], NaN for a tensor that is not finite. The
    #: quotient is one rounding, a stored reciprocal would make it two.
    tensor_factor: Array | None
    #: Largest magnitude measured, float32 [1, 1], where one scale serves the whole tensor: what a history records.
    amax: Array | None
    spec: QuantSpec = field(metadata={"static": True})
    #: (rows, k).
    shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of the data and scales."""
        return sum(x.size * x.dtype.itemsize for x in (self.data, self.scale, self.tensor_factor) if x is not None)

    @property
    def T(self) -> "Quantized":
        """The transpose [k, rows]; only specs whose blocks are square have one."""
        if not self.spec.transposable:
            raise ValueError(f"{self.spec} has no transpose, its blocks are not square; quantize the transpose instead")
        rows, k = self.shape
        data = pack(unpack(self.data, k).T) if self.spec.format.packed else self.data.T
        return Quantized(data, self.scale.T, self.tensor_factor, self.amax, self.spec, (k, rows))

    def codes(self) -> Array:
        """uint8 [rows, k], one code an element, every NaN as 0x7F."""
        fmt = self.spec.format
        if fmt.packed:
            return unpack(self.data, self.shape[1])
        if fmt.name not in FLOAT8:
            return self.data
        codes = lax.bitcast_convert_type(self.data, jnp.uint8)
        # Above infinity's code, or where E4M3 has none at 0x7F itself.
        last = (fmt.emax + fmt.bias << fmt.mantissa_bits) + (fmt.max_mantissa >> 23 - fmt.mantissa_bits)
        nan = lax.gt(lax.bitwise_and(codes, np.uint8(0x7F)), np.uint8(last if fmt.name == "e4m3" else last + 1))
        return where(nan, NAN_CODE, codes)

    def scales(self) -> Array:
        """float32 decode scales [blocks of rows, blocks of k], both levels multiplied."""
        if self.spec.scale == "e8m0":
            bits = self.scale.astype(jnp.int32)
            # Code 0 is 2**-127, whose float32 is subnormal: its mantissa holds the one bit. Code 255 is NaN.
            wide = where(lax.eq(bits, np.int32(255)), 0x7FC00000, lax.shift_left(bits, np.int32(23)))
            wide = where(lax.eq(bits, np.int32(0)), 0x00400000, wide)
            return lax.bitcast_convert_type(wide, jnp.float32)
        if self.spec.two_level:
            assert self.tensor_factor is not None
            blocks = lax.bitcast_convert_type(self.scale, jnp.float8_e4m3fn).astype(jnp.float32)
            # Divided by one number for each: XLA would multiply by the reciprocal of a broadcast scalar.
            factor = lax.broadcast_in_dim(self.tensor_factor, blocks.shape, (0, 1))
            return lax.div(blocks, lax.optimization_barrier(factor))
        return self.scale

    def values(self, dtype: Any = jnp.float32) -> Array:
        """[rows, k]: the data without the scales."""
        fmt = self.spec.format
        # Without the barrier XLA on a GPU deletes a cast to FP8 and back, and the rounding with it; and wherever
        # packing meets unpacking in one program, it computes every code again for each of its uses.
        data = lax.optimization_barrier(self.data)
        if fmt.packed:
            return e2m1_values(unpack(data, self.shape[1]), dtype)
        return data.astype(dtype) if fmt.name in FLOAT8 else values_of(data, fmt, dtype)

    def dequantize(self) -> Array:
        """float32 [rows, k]: data × scale. After a Hadamard these are the rotated values, as the GEMM sees them."""
        return over_blocks(self.values(), self.scales(), self.spec.block)


def as_bytes(kept: Any) -> Any:
    """A pytree of operands as it lies between forward and backward: codes of eight bits as uint8.

    `jax.checkpoint` rounds a float that it keeps to its own type, by a rule of IEEE formats: E4M3's 256 to 448 would
    become infinity.
    """

    def one(leaf: Any) -> Any:
        return lax.bitcast_convert_type(leaf, jnp.uint8) if leaf.dtype in _FLOAT8 else leaf

    return jax.tree.map(one, kept)


def as_codes(kept: Any) -> Any:
    """The operands that `as_bytes` was given."""

    def one(node: Any) -> Any:
        if not isinstance(node, Quantized) or node.spec.format.name not in FLOAT8:
            return node
        return replace(node, data=lax.bitcast_convert_type(node.data, FLOAT8[node.spec.format.name]))

    return jax.tree.map(one, kept, is_leaf=lambda node: isinstance(node, Quantized))


_FLOAT8 = tuple(FLOAT8.values())


def over_blocks(x: Array, factor: Array, block: Block) -> Array:
    """x [rows, k] with the elements of each block multiplied by the block's factor."""
    rows, k = x.shape
    if x.size == 0:
        return x
    if block in ((None, None), (1, None), (None, 1)):
        return lax.mul(x, factor)
    view = blocked(x, block)
    y = lax.mul(view, lax.expand_dims(factor, (1, 3)))
    return cut(y.reshape(view.shape[0] * view.shape[1], -1), rows, k)


def blocked(x: Array, block: Block) -> Array:
    """A matrix that is not empty as [blocks of rows, rows, blocks of k, k], ragged edges padded with zeros."""
    rows, k = x.shape
    br, bk = _within(block[0], rows), _within(block[1], k)
    nr, nk = -(-rows // br), -(-k // bk)
    return padded(x, nr * br - rows, nk * bk - k).reshape(nr, br, nk, bk)


def _within(block: int | None, length: Any) -> Any:
    """The length of a block on an axis. An axis of symbolic length (`jax.export`) is padded to whole blocks."""
    if block is None:
        return length
    return min(block, length) if isinstance(length, int) else block


def cut(x: Array, rows: int, k: int) -> Array:
    """The first rows and columns of a matrix."""
    return x if x.shape == (rows, k) else lax.slice(x, (0, 0), (rows, k))


def pack(codes: Array) -> Array:
    """Two four-bit codes to a byte: uint8 [rows, k] to [rows, ceil(k / 2)]."""
    rows, k = codes.shape
    pairs = padded(codes, 0, k % 2).reshape(rows, (k + 1) // 2, 2)
    low, high = (lax.index_in_dim(pairs, i, 2, keepdims=False) for i in (0, 1))
    return lax.bitwise_or(low, lax.shift_left(high, np.uint8(4)))


def unpack(packed: Array, k: int) -> Array:
    """uint8 [rows, ceil(k / 2)] to one code an element, [rows, k]."""
    rows, half = packed.shape
    pairs = lax.broadcast_in_dim(packed, (rows, half, 2), (0, 1))
    shifts = lax.broadcast_in_dim(np.array([0, 4], np.uint8), (rows, half, 2), (2,))
    codes = lax.bitwise_and(lax.shift_right_logical(pairs, shifts), np.uint8(15))
    return cut(codes.reshape(rows, 2 * half), rows, k)


def e2m1_values(codes: Array, dtype: Any) -> Array:
    """E2M1 codes to their values: the bits of a bfloat16 are put together."""
    code = codes.astype(jnp.uint16)
    magnitude = lax.bitwise_and(code, np.uint16(7))
    # 1/2 is a subnormal of the format; the others are normal numbers with one bit of mantissa.
    normal = lax.add(lax.shift_left(magnitude, np.uint16(6)), np.uint16(0x3F00))
    bits = where(lax.eq(magnitude, np.uint16(1)), 0x3F00, normal)
    bits = where(lax.eq(magnitude, np.uint16(0)), 0, bits)
    sign = lax.shift_left(lax.bitwise_and(code, np.uint16(8)), np.uint16(12))
    return lax.bitcast_convert_type(lax.bitwise_or(bits, sign), jnp.bfloat16).astype(dtype)


def values_of(codes: Array, fmt: Format, dtype: Any) -> Array:
    """The values of a format's codes, one a byte, looked up."""
    return jnp.asarray(numerics.values(fmt)).astype(dtype)[codes.astype(jnp.int32)]


# ---- given -----------------------------------------------------------------------------------------------
# What users hand to a function, looked at before JAX does: what does not fit is told in a sentence.


def array(where: str, argument: str, value: Any) -> Array:
    """An array of real numbers, also from numpy or a Variable of NNX.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{where}: {argument} is a {type(value).__name__}; give an array, such as jax.numpy.asarray({argument})"
        )
    real = jnp.issubdtype(value.dtype, np.number) and not jnp.issubdtype(value.dtype, np.complexfloating)
    if not real and value.dtype != np.bool_:
        raise TypeError(f"{where}: {argument} is an array of {value.dtype}; give one of real numbers")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def floating(where: str, dtype: Any) -> Any:
    """A floating dtype. Raises: ValueError where it is none."""
    try:
        own = None if isinstance(dtype, (jax.Array, np.ndarray)) else jnp.dtype(dtype)
    except (TypeError, ValueError):
        own = None
    if own is None or not jnp.issubdtype(own, jnp.floating):
        shown = repr(dtype) if own is None else own
        raise ValueError(f"{where} computes in a floating dtype, not {shown}; convert x, or give dtype=jnp.float32")
    return own


def state_of(where: str, state: Any) -> dict[str, Any]:
    """A layer's state as a dict of its own; {} for None. Raises: TypeError where it is none."""
    if state is None:
        return {}
    if not isinstance(state, Mapping) or not all(hasattr(leaf, "dtype") for leaf in state.values()):
        raise TypeError(
            f"{where}: state is a {type(state).__name__} and should be a dict of arrays, as "
            "quaver.jax.state.init(recipe) makes it and the state's gradient returns it"
        )
    return dict(state)
