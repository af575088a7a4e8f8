"""The GEMM is bounded: in float32 within 1e-6 relative RMS of float64 on the same operands; bf16 rounds that once."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaver.jax as qj
from quaver.recipes.spec import GemmSpec, QuantSpec
from quaver.reference import spread
from tests.close import assert_bitwise, assert_close
from tests.operands import GEMMS, MAGNITUDES

#: GEMMs that stand for the ways in which one is computed.
KINDS = ["delayed.dgrad", "rowwise(power_of_two=False).fprop", "blockwise.fprop", "mxfp8.fprop", "nvfp4.wgrad"]
#: Those of recipes as they come; a switch changes codes, and seldom how they are multiplied.
QUICK = [*KINDS, "mxfp8(weight_2d=True).fprop", "nvfp4(power_of_two=False).fprop", *(n for n in GEMMS if "(" not in n)]
every_gemm = pytest.mark.parametrize(
    "gemm",
    [pytest.param(gemm, id=n, marks=[] if n in QUICK else [pytest.mark.slow]) for n, gemm in GEMMS.items()],
)
each_kind = pytest.mark.parametrize("gemm", [GEMMS[name] for name in KINDS], ids=KINDS)


@partial(jax.jit, static_argnames=("gemm",))
def quantized(a: Any, b: Any, gemm: GemmSpec) -> tuple[qj.Quantized, qj.Quantized]:
    assert gemm.a is not None and gemm.b is not None
    return qj.quantize(a, gemm.a, seed=1), qj.quantize(b, gemm.b, seed=1)


def operands(magnitude: str, gemm: GemmSpec, m: int, k: int, n: int) -> tuple[qj.Quantized, qj.Quantized]:
    rng = np.random.default_rng(m * k * n)
    change, scale = MAGNITUDES[magnitude]
    a = change(rng, rng.normal(size=(m, k)).astype(np.float32))
    return quantized(a, rng.normal(size=(n, k)).astype(np.float32) * np.float32(scale), gemm)


#: As one program: eagerly each operation of reading an operand would be compiled.
read = jax.jit(lambda *operands: [(q.values(), q.scales()) for q in operands])


def exact(a: qj.Quantized, b: qj.Quantized) -> np.ndarray:
    """The product in float64, where no scale overflows."""
    x, y = (
        np.asarray(values, np.float64) * spread(np.asarray(scales, np.float64), q.spec.block, q.shape)
        for q, (values, scales) in zip((a, b), read(a, b), strict=True)
    )
    return x @ y.T


def within(a: qj.Quantized, b: qj.Quantized, what: str) -> None:
    with np.errstate(over="ignore", under="ignore"):
        assert_close(what, qj.matmul(a, b), exact(a, b).astype(np.float32), 1e-6)


@every_gemm
def test_float32_output_is_within_1e_6_of_float64(gemm: GemmSpec) -> None:
    for magnitude in MAGNITUDES:
        within(*operands(magnitude, gemm, 40, 300, 70), magnitude)


def _sums() -> Iterator[Any]:
    """Every kind in every size; quick is every kind in one size with a long sum and in one with a short one."""
    short, long = [(192, 512, 256), (500, 16, 1)], [(1, 2000, 130), (3, 8000, 90)]
    for i, name in enumerate(KINDS):
        for size in (*short, *long):
            quick = size in (short[i % 2], long[i // 2 % 2])
            yield pytest.param(GEMMS[name], size, id=f"{size}-{name}", marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("gemm, size", list(_sums()))
def test_sums_of_any_shape_are_within_1e_6_of_float64(gemm: GemmSpec, size: tuple[int, int, int]) -> None:
    for magnitude in ("normal", "one outlier"):
        within(*operands(magnitude, gemm, *size), magnitude)


@each_kind
def test_rows_of_every_size_keep_their_own_precision(gemm: GemmSpec) -> None:
    """Each row of the output is compared by itself, so that the largest row does not hide errors of the others."""
    rng = np.random.default_rng(0)
    sizes = 2.0 ** np.linspace(-60, 60, 40)[:, None]
    assert gemm.a is not None
    if gemm.a.two_level or gemm.a.block[0] is None:
        # One factor for all rows can only represent some of them.
        sizes = sizes**0.1
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 300), (70, 300)))
    qa, qb = quantized((a * sizes).astype(np.float32), b, gemm)
    for row, (y, right) in enumerate(zip(np.asarray(qj.matmul(qa, qb)), exact(qa, qb), strict=True)):
        assert_close(f"row {row}", y, right.astype(np.float32), 2e-6)


@pytest.mark.parametrize("name", ["mxfp8.fprop", "blockwise.fprop"])
def test_blocks_along_k_may_differ_by_the_range_of_float32(name: str) -> None:
    """Small blocks of a row are multiplied by large ones of the other operand, and none is lost."""
    rng = np.random.default_rng(0)
    sizes = np.repeat(2.0 ** np.array([70.0, -70.0, 0.0]), 128)
    a, b = (rng.normal(size=(20, 384)) * s for s in (sizes, 1 / sizes))
    within(*quantized(a.astype(np.float32), b.astype(np.float32), GEMMS[name]), "opposite sizes")


@each_kind
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_output_is_float64_rounded_once(gemm: GemmSpec, dtype: Any) -> None:
    wrong = total = 0
    for magnitude in ("normal", "zeros", "one outlier"):
        a, b = operands(magnitude, gemm, 40, 300, 70)
        for bias in (None, np.random.default_rng(1).normal(size=70).astype(np.float32)):
            y = exact(a, b)
            with np.errstate(over="ignore"):
                once = (y if bias is None else y + bias).astype(np.float32).astype(dtype)
            got = np.asarray(qj.matmul(a, b, dtype, bias))
            assert got.dtype == dtype
            wrong += int((got != once).sum())
            total += once.size
    # Sums in float32 may cross a tie; float16 is eight times finer.
    assert wrong <= (1e-3 if dtype == jnp.bfloat16 else 8e-3) * total, f"{wrong} of {total} are not rounded once"


def touched(spec: QuantSpec, rows: int) -> np.ndarray:
    """Rows that share a block with an infinity or NaN in row 0."""
    return np.arange(rows) < (rows if spec.two_level or spec.block[0] is None else spec.block[0])


@every_gemm
def test_nonfinite_values_make_only_the_products_of_their_block_nan(gemm: GemmSpec) -> None:
    assert gemm.a is not None and gemm.b is not None
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 300), (70, 300)))
    assert np.isfinite(qj.matmul(*quantized(a, b, gemm))).all()
    rows = np.broadcast_to(touched(gemm.a, 40)[:, None], (40, 70))
    columns = np.broadcast_to(touched(gemm.b, 70), (40, 70))
    for value in (np.nan, np.inf, -np.inf):
        bad_a, bad_b = a.copy(), b.copy()
        bad_a[0, 299] = bad_b[0, 3] = value
        for pair, nan, what in (
            ((bad_a, b), rows, "a"),
            ((a, bad_b), columns, "b"),
            ((bad_a, bad_b), rows | columns, ""),
        ):
            y = qj.matmul(*quantized(*pair, gemm))
            assert_bitwise(np.isnan(y), nan, f"{value} in {what or 'both'}")


@each_kind
@pytest.mark.parametrize("k", [96, 35, 32, 16, 2])
def test_operands_in_either_layout_have_the_same_product(gemm: GemmSpec, k: int) -> None:
    """On a CPU the left operand is moved in blocks of columns where k has more than one block."""
    assert gemm.a is not None and gemm.b is not None
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(rows, k)).astype(np.float32) for rows in (40, 70))

    @jax.jit
    def products(a: Any, b: Any) -> list[Any]:
        lefts = qj.quantize(a, gemm.a, seed=1), qj.quantize(a.T, gemm.a, seed=1, axis=0)  # type: ignore[arg-type]
        rights = qj.quantize(b, gemm.b, seed=1), qj.quantize(b.T, gemm.b, seed=1, axis=0)  # type: ignore[arg-type]
        return [qj.matmul(left, right) for left in lefts for right in rights]

    first, *others = map(np.asarray, products(a, b))
    for y in others:
        assert_close("product", y, first, 1e-6)


@each_kind
@pytest.mark.parametrize("m, k, n", [(0, 16, 8), (8, 16, 0), (8, 0, 4), (0, 0, 0)])
def test_an_empty_gemm_is_zeros_or_the_bias(gemm: GemmSpec, m: int, k: int, n: int) -> None:
    @jax.jit
    def both(a: Any, b: Any, bias: Any) -> tuple[Any, Any]:
        operands = quantized(a, b, gemm)
        return qj.matmul(*operands), qj.matmul(*operands, bias=bias)

    bias = np.arange(n, dtype=np.float32)
    y, biased = both(np.ones((m, k), np.float32), np.ones((n, k), np.float32), bias)
    assert_bitwise(np.asarray(y), np.zeros((m, n), np.float32))
    assert_bitwise(np.asarray(biased), np.broadcast_to(bias, (m, n)))


@each_kind
def test_a_batch_is_its_matrices_one_by_one(gemm: GemmSpec) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 20, 70)).astype(np.float32), rng.normal(size=(11, 70)).astype(np.float32)
    one = jax.jit(lambda x: qj.matmul(*quantized(x, b, gemm)))
    for x, y in zip(a, np.asarray(jax.jit(jax.vmap(one))(a)), strict=True):
        assert_close("one of the batch", y, one(x), 1e-6)


def test_operands_that_do_not_share_k_and_odd_dtypes_are_refused() -> None:
    gemm = GEMMS["delayed.fprop"]
    a, b = operands("normal", gemm, 4, 16, 4)[0], operands("normal", gemm, 4, 32, 4)[1]
    with pytest.raises(ValueError, match="k must agree"):
        qj.matmul(a, b)
    with pytest.raises(ValueError, match="not float64"):
        qj.matmul(a, a, np.float64)
