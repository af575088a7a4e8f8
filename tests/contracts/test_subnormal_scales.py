"""The limit of JAX's bound for scales that are no powers of two on a CPU, as documented in docs/design/numerics.md."""

import jax.numpy as jnp
import numpy as np
import pytest

import quaver.jax as qj
from quaver import E2M1, E4M3, E5M2, QuantSpec, reference

SMALLEST_NORMAL = np.finfo(np.float32).tiny
#: The spec, the amax below which subnormal elements have codes, and the one below which scales are subnormal.
ENDS = {
    "e5m2": (QuantSpec(E5M2, scale="fp32"), 1e-28, 7e-34),
    "e4m3": (QuantSpec(E4M3, (1, None), "fp32"), 6e-33, 6e-36),
    "e2m1": (QuantSpec(E2M1, (1, 32), "fp32"), 5e-37, 8e-38),
    "nvfp4": (QuantSpec(E2M1, (1, 16), "two_level_fp32"), 7e-32, 8e-38),
}


def operand_with_amax(amax: float, seed: int) -> np.ndarray:
    """Each row and each block of 16 with this amax and elements of every size below it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(32, 64)) * 10.0 ** rng.uniform(-8, 0, (32, 64))
    x[:, ::16] = np.sign(x[:, ::16])
    return np.clip(x, -1, 1).astype(np.float64) * amax


def steps(codes: np.ndarray, expected: np.ndarray, bits: int) -> np.ndarray:
    signed = [np.where(c >> bits - 1, -(c % 2 ** (bits - 1)), c) for c in (codes.astype(int), expected.astype(int))]
    return np.abs(signed[0] - signed[1])


def compare(name: str, amax: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that each code is off, ulps that each scale is off, and which elements are subnormal."""
    spec = ENDS[name][0]
    x = operand_with_amax(amax, 0).astype(np.float32)
    q, r = qj.quantize(jnp.asarray(x), spec), reference.quantize(x, spec)
    ulps = np.abs(np.asarray(q.scales()).view(np.int32).astype(np.int64) - r.scales().view(np.int32))
    return steps(np.asarray(q.codes()), r.codes(), spec.format.bits), ulps, np.abs(x) < SMALLEST_NORMAL


@pytest.mark.parametrize("name", ENDS)
def test_above_the_ends_scales_are_within_an_ulp_and_codes_within_a_step(name: str) -> None:
    _, element_limit, scale_limit = ENDS[name]
    for times in (1.01, 1.7, 40.0, 1e6):
        off, ulps, _ = compare(name, element_limit * times)
        assert off.max() <= 1 and ulps.max() <= 1, f"amax {element_limit * times}: {off.max()} steps, {ulps.max()} ulps"
        _, ulps, _ = compare(name, scale_limit * times)
        assert ulps.max() <= 1, f"amax {scale_limit * times}: {ulps.max()} ulps"


@pytest.mark.parametrize("name", ENDS)
def test_below_them_only_subnormal_elements_are_further_off_and_scales_are_zero(name: str) -> None:
    spec, element_limit, scale_limit = ENDS[name]
    furthest = 0
    for amax in np.geomspace(1.2 * float(SMALLEST_NORMAL), element_limit, 30):
        off, _, subnormal = compare(name, amax)
        assert off[~subnormal].max() <= 1, f"amax {amax}: {off[~subnormal].max()} steps"
        furthest = max(furthest, off.max())
    assert furthest > 1, "the bound does end"
    x = jnp.asarray(operand_with_amax(scale_limit / 3, 0), jnp.float32)
    assert not np.asarray(qj.quantize(x, spec).dequantize()).any()
