"""The one container of quantized data, a pytree, and how its bytes are laid out."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.core.numbers import rounding
from quaver.core.numbers.formats import Format
from quaver.core.numbers.rounding import NAN_CODE
from quaver.core.spec import Block, QuantSpec
from quaver.jax.numerics.elementwise import padded, where

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
    return jnp.asarray(rounding.values(fmt)).astype(dtype)[codes.astype(jnp.int32)]
