"""Optimizer states in JAX are those of the reference in numpy, bit by bit: every spec and shape, on hard values."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.numerics import optimizer_state
from quaver.reference import optim
from quaver.reference.optimizer_state import CODES, StateSpec
from tests.states import KINDS, drawn, every_spec
from tests.xla_options import QUICKEST

SHAPES = ((0, 5), (5, 0), (7,), (), (2, 64), (2, 3, 70))
SPECS = [
    spec
    for spec in every_spec((16, None))
    if (spec.block, spec.scale) == (16, "bfloat16")
    or (not spec.stochastic and not spec.floor and (spec.block is None) == (spec.scale == "float32"))
    or spec.of.kind == "expanded"
]
#: One spec of each kind, for programs that XLA optimizes.
COMPILED = [
    "bfloat16 stochastic",
    "float16/tensor power_of_two",
    "e4m3/16",
    "e5m2/16 stochastic",
    "root_e4m4/16 stochastic floor",
    "root_e4m3/tensor float32",
    "int8_softsign/16",
    "int8_softsign/16 stochastic",
    "uint8_root/16 stochastic floor",
    "int8_root/16",
    "int8_dynamic/16 float32",
]
Written = Callable[..., tuple[jax.Array, jax.Array | None, jax.Array]]


@cache
def written(spec: StateSpec, optimized: bool = False) -> Written:
    """Codes, scales and decoded values, in one program."""

    def both(x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        codes, scale = optimizer_state.encode(x, spec, noise if spec.stochastic else None)
        return codes, scale, optimizer_state.decode(codes, scale, spec)

    return jax.jit(both, compiler_options=None if optimized else QUICKEST)


def compare(spec: StateSpec, kind: str, shape: tuple[int, ...], optimized: bool = False) -> None:
    rng = np.random.default_rng(0)
    x = drawn(kind, shape, rng)
    x = x if spec.of.signed else np.abs(x)
    noise = (rng.integers(0, 2**15, shape) * (rng.random(shape) < 0.9)).astype(np.int32)
    with np.errstate(all="ignore"):
        want, want_scale = optim.encode(x, spec, noise)
        want_values = optim.decode(want, want_scale, spec)
    codes, scale, values = written(spec, optimized)(x, noise)
    message = f"{spec.text} {kind} {shape}"
    got = np.asarray(codes).view(np.uint16) if codes.dtype == jnp.bfloat16 else np.asarray(codes)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), message
    if scale is None:
        assert want_scale is None
    elif spec.of.kind == "expanded":
        assert want_scale is not None
        np.testing.assert_allclose(np.asarray(scale), want_scale, rtol=2e-5, err_msg=message)
        differences = np.abs(got.astype(int) - want.astype(int))
        assert differences.max(initial=0) <= 1 and differences.sum() <= 3 + differences.size // 1000, message
        return
    else:
        np.testing.assert_array_equal(np.asarray(scale.astype(jnp.float32)), want_scale, err_msg=message)
    equal(got, want, message)
    equal(np.asarray(values), want_values, message)


def equal(a: np.ndarray, b: np.ndarray, message: str) -> None:
    np.testing.assert_array_equal(a, b, err_msg=message)
    if a.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]), err_msg=message)


@pytest.mark.parametrize("code", CODES)
def test_jax_writes_and_reads_the_same_states_as_numpy(code: str) -> None:
    for spec in (spec for spec in SPECS if spec.code == code):
        for kind in KINDS:
            compare(spec, kind, (24, 100))


@pytest.mark.parametrize(
    ("code", "shape"), [(code, shape) for i, code in enumerate(CODES) for shape in SHAPES[i % 3 :: 3]], ids=str
)
def test_of_every_shape(code: str, shape: tuple[int, ...]) -> None:
    """Each code has two of the shapes: every program takes a tenth of a second to compile."""
    compare(next(spec for spec in SPECS if spec.code == code), "normal", shape)


@pytest.mark.parametrize("text", COMPILED)
def test_an_optimized_program_does_too(text: str) -> None:
    for kind in KINDS:
        compare(StateSpec.parse(text), kind, (24, 100), optimized=True)


def test_a_piece_of_a_tensor_is_written_by_the_amax_of_the_whole() -> None:
    spec = StateSpec(code="e4m3", block=None, scale="power_of_two")
    x = drawn("normal", (6, 40), np.random.default_rng(1))
    want, scale = optim.encode(x, spec)
    codes, own = optimizer_state.encode(jnp.asarray(x[2:4]), spec, amax=jnp.asarray(np.abs(x).max()))
    np.testing.assert_array_equal(np.asarray(codes), want[2:4])
    np.testing.assert_array_equal(np.asarray(own), scale)
