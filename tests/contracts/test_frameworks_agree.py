"""Bits are part of the API: JAX stores the same bits as numpy and torch, eager and under jit."""

import dataclasses
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver import reference
from quaver.recipes.formats import E2M1, E4M3, E5M2, E8M0, Format
from quaver.recipes.formats import FORMATS as FORMATS_BY_NAME
from quaver.recipes.spec import QuantSpec
from tests.close import assert_bitwise
from tests.operands import SPECS, nasty
from tests.pairs import alternating
from tests.xla_options import QUICKEST

STREAM: dict[str, Any] = {"seed": 0x1234567890ABCDEF, "tensor_id": 0xDEADBEEF, "count": 3}
#: Dtypes of numbers that are passed to jitted functions.
WORDS = {"tensor_id": np.uint32, "count": np.uint32, "factor": np.float32}
DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(ml_dtypes.bfloat16): torch.bfloat16}
#: Operands that no built-in recipe has, but that a user's recipe may have.
OTHERS = {
    "stochastic e4m3": QuantSpec(E4M3, (1, 32), "e8m0", "stochastic"),
    "stochastic e5m2": QuantSpec(E5M2, rounding="stochastic"),
    "unit": QuantSpec(E5M2, scale="unit"),
    "one-level e2m1": QuantSpec(E2M1, (None, 16), "power_of_two", hadamard=True),
    "columns": QuantSpec(E4M3, (None, 1), "power_of_two"),
}
EVERY = SPECS | OTHERS
#: Of float32 operands: beyond the largest block and ragged in both directions; one program a spec serves all of them.
RAGGED = (147, 294)
SMALLEST = [(1, 1), (0, 5), (5, 0)]


def kind(spec: QuantSpec) -> tuple[Any, ...]:
    """Properties that decide a program's shapes and first operations; formats of a kind differ in numbers."""
    return spec.block, spec.two_level, spec.scale == "unit", spec.rounding, spec.hadamard, spec.format.stored_bits


#: Names of the first spec of each kind, and of each kind and format. Quick tests let LLVM optimize one of each kind,
#: regardless of its block.
KINDS = list({kind(spec): name for name, spec in reversed(EVERY.items())}.values())
FORMATS = list({(kind(spec), spec.format): name for name, spec in reversed(EVERY.items())}.values())
LLVM = list({kind(spec)[1:]: name for name, spec in reversed(EVERY.items())}.values())


def _one_of_each_kind() -> Iterator[Any]:
    """Each spec; quick is one of each kind."""
    for name, spec in EVERY.items():
        yield pytest.param(spec, id=name, marks=[] if name in KINDS else [pytest.mark.slow])


def _optimized(kinds: Collection[str], quick: Collection[str] = EVERY) -> Iterator[Any]:
    """Each spec with its programs: optimized by LLVM for these specs; for others the optimized program is slow, and
    specs that are not quick have no other."""
    for name, spec in EVERY.items():
        if name in quick:
            yield pytest.param(spec, stored if name in kinds else stored_quickly, id=name)
        if name not in kinds:
            yield pytest.param(spec, stored, id=f"{name}, optimized", marks=pytest.mark.slow)


def _narrow() -> Iterator[Any]:
    """Each operand of a recipe; quick are those that differ in what reads x first: the amax of a tensor, of rows or of
    squares, of both levels, a rotation, the noise."""
    first = {(s.per_tensor, s.transposable, s.rounding, s.hadamard): name for name, s in reversed(SPECS.items())}
    quick = {*first.values(), "mxfp8.fprop.a", "nvfp4.fprop.a"}
    for name in SPECS:
        yield pytest.param(name, jnp.bfloat16, marks=[] if name in quick else [pytest.mark.slow])
    yield "mxfp8.fprop.a", jnp.float16


def eager(x: Any, spec: QuantSpec, amax: Any = None, **options: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = qj.quantize(x, spec, amax, **options)
    return q.scales(), q.codes(), q.dequantize()


#: Stored and decoded values of a program compiled as a whole.
stored = jax.jit(eager, static_argnames=("spec", "seed"))
#: The same from a program that LLVM did not optimize: for tests of the input of a scale, or of a shape.
stored_quickly = jax.jit(
    eager,
    static_argnames=("spec", "seed"),
    compiler_options=QUICKEST,
)


def same(got: tuple[Any, Any, Any], expected: reference.Quantized, case: str, exact: bool = False) -> None:
    """Bit for bit; unless all is exact, scales that are no powers of two may be an ulp off, and then codes a step."""
    scales, codes, values = (np.asarray(x) for x in got)
    with np.errstate(over="ignore", invalid="ignore"):
        right = expected.scales(), expected.codes(), expected.dequantize()
    if expected.spec.scale in ("fp32", "two_level_fp32") and not exact:
        ulps = np.abs(scales.view(np.int32).astype(np.int64) - flushed(right[0]).view(np.int32))
        odd = np.where(np.isnan(right[0]), ~np.isnan(scales), ulps > 1)
        assert not odd.any(), f"{case}: a scale is {scales[odd][0]}, expected {right[0][odd][0]}"
        if ulps.any():
            assert np.abs(codes.astype(int) - right[1]).max(initial=0) <= 1, f"{case}: a code is more than a step off"
        else:
            assert_bitwise(codes, right[1], f"{case}, codes")
        return
    assert_bitwise(scales, right[0], f"{case}, scales")
    assert_bitwise(codes, right[1], f"{case}, codes")
    assert_bitwise(flushed(values), flushed(right[2]), f"{case}, values")


def flushed(x: np.ndarray) -> np.ndarray:
    """Replace subnormals by zeros of their sign, as XLA does on a CPU."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def torchs(x: np.ndarray, spec: QuantSpec, amax: np.ndarray | None = None, **options: Any) -> tuple[Any, Any, Any]:
    t = torch.from_numpy(x.astype(np.float32)).to(DTYPES[x.dtype])
    q = qt.quantize(t, spec, None if amax is None else torch.from_numpy(amax), **options)
    return q.scales(), q.codes(), q.dequantize()


def agree(
    x: np.ndarray, spec: QuantSpec, amax: np.ndarray | None, what: str, run: Any = stored, **options: Any
) -> None:
    """numpy, torch, and JAX as one program store the same."""
    expected = reference.quantize(x.astype(np.float32), spec, amax, **options)
    words = {name: value if name == "seed" else np.asarray(value, WORDS[name]) for name, value in options.items()}
    same(torchs(x, spec, amax, **options), expected, f"{what}, torch", exact=True)
    if spec.scale in ("fp32", "two_level_fp32") and not spec.hadamard:
        # With such large factors a subnormal would matter, but XLA on a CPU flushes it.
        expected = reference.quantize(flushed(x.astype(np.float32)), spec, amax, **options)
    same(run(x, spec, amax, **words), expected, f"{what}, jax")


def every_bf16() -> Iterator[tuple[str, np.ndarray]]:
    """All 65,536 values as one operand; and again with zeros for non-finite ones, which would decide every scale."""
    values = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    finite = np.where(np.isfinite(values.astype(np.float32)), values, values.dtype.type(0))
    yield from (("all", values), ("finite", finite), ("finite, along k", np.ascontiguousarray(finite.T)))


def floats(bits: np.ndarray) -> np.ndarray:
    """float32 numbers of these bits, without NaN and infinities."""
    x = bits.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1))


@pytest.mark.parametrize("spec, run", list(_optimized((), FORMATS)))
def test_every_bf16_value_gets_the_same_codes(spec: QuantSpec, run: Any) -> None:
    """Optimized programs of bf16 are those of test_a_rounding_before_the_operand_is_not_skipped. Behind the conversion
    to float32 nothing knows of bf16, least of all a scale that is no power of two."""
    for name, x in every_bf16():
        agree(x, spec, None, name, run, **STREAM)


@pytest.mark.parametrize("spec, run", list(_optimized(LLVM)))
def test_random_float32_bits_and_edge_cases_get_the_same_codes(spec: QuantSpec, run: Any) -> None:
    rng = np.random.default_rng(0)
    x = floats(rng.integers(0, 2**32, RAGGED))
    agree(x, spec, None, "any bits", run, **STREAM)
    # Exponents close to one another, with all mantissa bits used.
    near = floats(rng.integers(0, 2**23, RAGGED) + (rng.integers(117, 137, RAGGED) << 23))
    agree(near * rng.choice(np.array([-1, 1], np.float32), near.shape), spec, None, "near one", run, **STREAM)
    for name, x in nasty(RAGGED).items():
        agree(x, spec, None, name, run, **STREAM)


@pytest.mark.parametrize(("name", "shape"), alternating(KINDS, SMALLEST, []))
def test_the_smallest_shapes_get_the_same_codes(name: str, shape: tuple[int, int]) -> None:
    agree(np.full(shape, -1.7, np.float32), EVERY[name], None, str(shape), stored_quickly, **STREAM)


@pytest.mark.parametrize("spec", list(_one_of_each_kind()))
def test_a_given_amax_gives_the_same_codes(spec: QuantSpec) -> None:
    shape = (1, 1) if spec.two_level else spec.blocks(19, spec.padded(70))
    values = nasty((19, 70))
    few = ("normal", "wide", "subnormal", "NaN", "infinity", "huge")
    for amax, names in ((1.3, values), (0.0, few), (1e-39, few), (3e38, few), (np.inf, few), (np.nan, few)):
        for name in names:
            agree(values[name], spec, np.full(shape, amax, np.float32), f"{name}, amax {amax}", stored_quickly)


@pytest.mark.parametrize("spec", [s for s in EVERY.values() if s.per_tensor and s.scale != "unit"], ids=str)
def test_a_given_factor_gives_the_same_codes(spec: QuantSpec) -> None:
    for factor in (0.0, 8.0, 2.0**-126, 2.0**100) if spec.power_of_two else (0.0, 8.0, 0.3, 1e30):
        for name, x in nasty((19, 70)).items():
            agree(x, spec, None, f"{name}, factor {factor}", stored_quickly, factor=factor)


def test_a_factor_is_refused_where_a_tensor_has_no_single_float32_scale() -> None:
    x = nasty((16, 32))["normal"]
    others = [s for s in EVERY.values() if not s.per_tensor or s.scale not in ("fp32", "power_of_two")]
    for spec in [*others, QuantSpec(E4M3, scale="e8m0")]:
        for quantize, value in ((reference.quantize, x), (qt.quantize, torch.tensor(x)), (qj.quantize, jnp.asarray(x))):
            with pytest.raises(ValueError, match="one fp32 or power-of-two scale per tensor"):
                quantize(value, spec, factor=2.0)


@pytest.mark.usefixtures("hardly_optimized")
@pytest.mark.parametrize("spec", [EVERY[name] for name in LLVM], ids=LLVM)
def test_eager_and_compiled_calls_store_the_same_codes(spec: QuantSpec) -> None:
    hard = nasty((37, 128))
    for name in ("wide", "subnormal", "NaN"):
        x = hard[name]
        narrow = x.astype(ml_dtypes.bfloat16)
        same(eager(narrow, spec, **STREAM), reference.quantize(narrow.astype(np.float32), spec, **STREAM), name)


@pytest.mark.usefixtures("hardly_optimized")
@pytest.mark.parametrize(
    "name", ["mxfp8(weight_2d=True).fprop.b", pytest.param("nvfp4.wgrad.a", marks=pytest.mark.slow)]
)
def test_results_do_not_depend_on_fused_compilation(name: str) -> None:
    x = nasty((5, 40))["normal"]
    with jax.disable_jit():
        same(eager(jnp.asarray(x), SPECS[name], **STREAM), reference.quantize(x, SPECS[name], **STREAM), name)


@pytest.mark.parametrize("name, dtype", list(_narrow()))
def test_a_rounding_before_the_operand_is_not_skipped(name: str, dtype: Any) -> None:
    """Within a fusion XLA may keep more than sixteen bits between two operations; the operand has its dtype's."""
    spec = SPECS[name]

    @jax.jit
    def step(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        y = x * jnp.asarray(0.37, dtype) + x
        return eager(y, spec, **STREAM), jax.lax.optimization_barrier(y)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 96)).astype(dtype))
    got, y = step(x)
    same(got, reference.quantize(np.asarray(y, np.float32), spec, **STREAM), "after two operations")


@pytest.mark.parametrize("spec", [s for s in EVERY.values() if s.transposable], ids=str)
def test_the_transpose_of_a_square_block_matches_numpy(spec: QuantSpec) -> None:
    @partial(jax.jit, compiler_options=QUICKEST)
    def transpose(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        transposed = qj.quantize(x, spec, **STREAM).T
        return transposed.scales(), transposed.codes(), transposed.dequantize()

    x = nasty((37, 71))["normal"]
    q = reference.quantize(x, spec, **STREAM)
    for got, right in zip(transpose(x), (q.scales(), q.codes(), q.dequantize()), strict=True):
        assert_bitwise(np.asarray(got), right.T)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS_BY_NAME.values() if fmt.signed], ids=str)
def test_decoded_values_match_the_reference_and_requantize_to_the_same_codes(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    values = reference.decode(codes, fmt)[None]
    codes, values = codes[~np.isnan(values[0])], values[:, ~np.isnan(values[0])]
    spec = QuantSpec(fmt, scale="unit")
    for q in (qt.quantize(torch.from_numpy(values), spec), qj.quantize(jnp.asarray(values), spec)):
        assert_bitwise(np.asarray(q.codes())[0], codes)
        assert_bitwise(np.asarray(q.dequantize()), values)


def test_scales_of_all_e8m0_codes_are_the_references() -> None:
    spec, codes = QuantSpec(E4M3, (1, 32), "e8m0"), np.arange(256, dtype=np.uint8)[:, None]
    expected = reference.decode(codes, E8M0)
    ones = np.ones((256, 32), np.float32)
    torch_operand, jax_operand = qt.quantize(torch.from_numpy(ones), spec), qj.quantize(jnp.asarray(ones), spec)
    torch_operand = dataclasses.replace(torch_operand, scale=torch.from_numpy(codes))
    jax_operand = dataclasses.replace(jax_operand, scale=jnp.asarray(codes))
    for q in (torch_operand, jax_operand):
        # As integers: XLA on a CPU flushes the subnormal 2**-127.
        bits = np.asarray(q.scales()).view(np.int32)
        assert_bitwise(bits, expected.view(np.int32))
