"""What `Quantized` is to JAX, the operands that quantize takes and refuses, and the noise of pieces and batches."""

import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaver.jax as qj
from quaver import reference
from quaver.jax.numerics.rounding import rotate, uniform
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import QuantSpec
from quaver.reference import numerics
from tests import forked
from tests.close import assert_bitwise
from tests.operands import SPECS
from tests.xla_options import QUICKEST

#: One spec of each kind of data and scales.
KINDS = {(s.format.stored_bits, s.scale, s.block[0] == 1): name for name, s in reversed(SPECS.items())}
one_of_each_kind = pytest.mark.parametrize("spec", [SPECS[name] for name in KINDS.values()], ids=KINDS.values())
LINE, SQUARE = SPECS["mxfp8.fprop.a"], SPECS["delayed.fprop.a"]
NOISY = QuantSpec(E4M3, (1, 32), "e8m0", "stochastic")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@cache
def operand(spec: QuantSpec) -> qj.Quantized:
    """What it holds is nobody's claim here, so the program that makes it is not optimized."""
    make = jax.jit(lambda x: qj.quantize(x, spec), compiler_options=QUICKEST)
    return make(normal(20, 70))


def same(a: qj.Quantized, b: qj.Quantized) -> None:
    assert (a.spec, a.shape) == (b.spec, b.shape)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert_bitwise(*(np.asarray(z).view(np.uint8) if z.dtype.itemsize == 1 else np.asarray(z) for z in (x, y)))


@one_of_each_kind
def test_a_quantized_operand_passes_through_jit(spec: QuantSpec) -> None:
    q = operand(spec)
    same(jax.jit(lambda q: q, compiler_options=QUICKEST)(q), q)
    leaves, structure = jax.tree.flatten(q)
    same(jax.tree.unflatten(structure, leaves), q)


@one_of_each_kind
def test_quantizing_a_quantized_returns_it(spec: QuantSpec) -> None:
    q = operand(spec)
    assert qj.quantize(q, spec) is q


@one_of_each_kind
def test_quantizing_along_the_first_axis_gives_the_operand_of_the_transpose(spec: QuantSpec) -> None:
    @jax.jit
    def both(x: jax.Array) -> list[tuple[jax.Array, ...]]:
        stream = {"seed": 1, "tensor_id": 2, "count": 3}
        operands = qj.quantize(x, spec, axis=0, **stream), qj.quantize(x.T, spec, **stream)
        assert operands[0].shape == operands[1].shape and [q.axis for q in operands] == [0, 1]
        return [(q.codes(), q.scales(), q.values(), q.dequantize()) for q in operands]

    for x in (normal(70, 20), normal(64, 32)):
        for first, last in zip(*both(x), strict=True):
            assert_bitwise(np.asarray(first), np.asarray(last))


@one_of_each_kind
def test_either_layout_has_the_same_transpose_and_bytes(spec: QuantSpec) -> None:
    x = normal(64, 96)
    q, other = qj.quantize(x, spec), qj.quantize(x.T, spec, axis=0)
    assert q.nbytes == other.nbytes
    same(other.with_k_last(), q)
    if spec.transposable:
        same(q.T.T, q)
        assert_bitwise(np.asarray(other.T.codes()), np.asarray(q.codes()).T)
        assert_bitwise(np.asarray(q.T.scales()), np.asarray(q.scales()).T)


def test_an_amax_for_each_block_has_the_shape_of_the_operands_scales() -> None:
    x, amax = normal(20, 70), np.exp2(np.arange(20 * 3).reshape(20, 3) % 5)
    last, first = qj.quantize(x, LINE, amax), qj.quantize(x.T, LINE, amax, axis=0)
    same(first.with_k_last(), last)
    with pytest.raises(ValueError, match="axis is 2"):
        qj.quantize(x, LINE, axis=2)


def test_other_specs_ranks_and_dtypes_are_refused() -> None:
    q = qj.quantize(normal(4, 32), LINE)
    with pytest.raises(ValueError, match="dequantize\\(\\) it first"):
        qj.quantize(q, SQUARE)
    with pytest.raises(ValueError, match="reshape it first"):
        qj.quantize(normal(2, 4, 32), LINE)
    for odd in (np.zeros((2, 2)), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match="convert it first"):
            qj.quantize(odd, LINE)
    with pytest.raises(ValueError, match="blocks are not square"):
        _ = q.T


def test_data_have_eight_bits_or_four() -> None:
    stored = jax.jit(partial(qj.quantize, normal(64, 96)), static_argnums=0, compiler_options=QUICKEST)
    assert stored(SQUARE).data.dtype == jnp.float8_e4m3fn
    assert stored(QuantSpec(E5M2)).data.dtype == jnp.float8_e5m2
    assert stored(LINE).nbytes == 64 * 96 + 64 * 3
    assert stored(SPECS["nvfp4.fprop.a"]).nbytes == 64 * 48 + 64 * 6 + 4


def test_the_amax_is_stored_where_a_history_would_record_it() -> None:
    x = normal(20, 70)
    top = np.abs(x).max()
    assert_bitwise(np.asarray(qj.quantize(x, SQUARE).amax), top.reshape(1, 1))
    assert_bitwise(np.asarray(qj.quantize(x, SQUARE, amax=9.0, factor=2.0).amax), top.reshape(1, 1))
    assert qj.quantize(x, LINE).amax is None


def test_an_amax_may_be_a_number() -> None:
    x = normal(20, 70)
    same(qj.quantize(x, SQUARE, 1.3), qj.quantize(x, SQUARE, np.full((1, 1), 1.3, np.float32)))


def test_a_factor_need_not_be_a_power_of_two() -> None:
    x = normal(64, 96)
    q, r = qj.quantize(x, QuantSpec(E4M3), factor=5.3), reference.quantize(x, QuantSpec(E4M3), factor=5.3)
    assert_bitwise(np.asarray(q.codes()), r.codes())
    assert_bitwise(np.asarray(q.scales()), r.scales())


@pytest.mark.parametrize("name", ["delayed.dgrad.a", "mxfp8.fprop.a", "nvfp4.wgrad.a"])
def test_a_batch_is_quantized_matrix_by_matrix(name: str) -> None:
    x = normal(3, 20, 70)
    one = jax.jit(lambda x: qj.quantize(x, SPECS[name]))
    together = jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(x))
    for i in range(3):
        same(jax.tree.map(lambda leaf, i=i: leaf[i], together), one(x[i]))


@pytest.mark.parametrize("shape", [(300, 301), (7, 3), (5, 8), (0, 4), (4, 0)])
def test_jax_draws_the_numbers_of_numpy(shape: tuple[int, int]) -> None:
    seed, stream = 0x1234567890ABCDEF, 0xDEADBEEF
    expected = numerics.uniform(*shape, seed, stream, 5)
    if min(shape) > 0 and max(shape) < 10:
        # Elsewhere no operation is compiled by itself.
        for count in (5, (7 << 32) + 5):
            assert_bitwise(numerics.uniform(*shape, seed, stream, count), expected)
            assert_bitwise(np.asarray(uniform(*shape, seed, stream, count)), expected)
    traced = jax.jit(lambda count: uniform(*shape, seed, jnp.uint32(stream), count))(jnp.float32(5))
    assert_bitwise(np.asarray(traced), expected)


@pytest.mark.parametrize("columns", [12, 10])
def test_a_part_draws_the_noise_of_the_whole(columns: int) -> None:
    whole = np.asarray(jax.jit(lambda stream: uniform(12, 3 * columns, 1, stream, 3))(2))
    piece = jax.jit(lambda row, column: uniform(4, columns, 1, 2, 3, (row, column, 3 * columns)))
    for row in (0, 4, 8):
        for column in (0, columns, 2 * columns):
            expected = whole[row : row + 4, column : column + columns]
            assert_bitwise(np.asarray(piece(row, column)), expected)


def test_counters_beyond_32_bits_carry_over() -> None:
    """The last rows of an operand of 2**35 elements, whose counters need the second word."""
    row, k = 2**20 - 1, 2**15
    counter = row * k // 4 + np.arange(k // 4, dtype=np.uint64)
    key, upper = numerics.noise_stream(1, 2, 3)
    words = numerics.philox2x32((counter & 0xFFFFFFFF, counter >> 32 ^ np.uint64(upper)), key)
    halves = np.stack([words >> np.uint32(16), words & np.uint32(0xFFFF)], -1).reshape(1, k)
    expected = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
    assert (counter >> 32).max() == 1
    for columns in (k, k - 1):
        piece = jax.jit(lambda row, columns=columns: uniform(1, columns, 1, 2, 3, (row, 0, k)))
        assert_bitwise(np.asarray(piece(row)), expected[:, :columns])


rotated = jax.jit(rotate)


@pytest.mark.parametrize("exponent", [-149, -130, -126, -100, -61, 0, 100, 123])
def test_the_rotation_has_the_bits_of_numpy_at_every_size(exponent: int) -> None:
    x = np.ldexp(normal(40, 70), exponent).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = numerics.rotate(x)
    tiny = np.finfo(np.float32).tiny
    assert_bitwise(
        np.asarray(rotated(x)),
        np.where(np.abs(expected) < tiny, np.copysign(np.float32(0), expected), expected),
    )


def test_an_old_jax_is_refused() -> None:
    code = "import jax; jax.__version_info__, jax.__version__ = (0, 9, 0), '0.9.0'; import quaver.jax"
    done = forked.bare("jax").run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs jax 0.10.2 or newer and found 0.9.0" in done.stderr.splitlines()[-1]


def test_noise_follows_seed_tensor_and_count() -> None:
    x = normal(64, 96)
    drawn = jax.jit(
        lambda seed, tensor_id, count: qj.quantize(x, NOISY, seed=seed, tensor_id=tensor_id, count=count).codes(),
        static_argnames="seed",
    )
    codes = [
        np.asarray(drawn(**{"seed": 3, "tensor_id": 4, "count": 5} | change))
        for change in ({}, {}, {"seed": 1}, {"tensor_id": 1}, {"count": 1})
    ]
    assert_bitwise(codes[0], codes[1])
    for other in codes[2:]:
        assert (codes[0] != other).mean() > 0.05
