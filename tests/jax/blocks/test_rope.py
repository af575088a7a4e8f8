"""Rotary positions against complex multiplication in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks.attention import rope
from tests.close import assert_close
from tests.pairs import pairs


def expected(
    x: np.ndarray, positions: np.ndarray, turning: int, interleaved: bool, theta: float = 10_000
) -> np.ndarray:
    """positions [B, S]; pairs of features are complex numbers."""
    half = turning // 2
    angle = positions[..., None] * theta ** (-np.arange(half) / half)
    rotation = np.exp(1j * angle)[:, :, None]
    first = slice(0, turning, 2) if interleaved else slice(0, half)
    second = slice(1, turning, 2) if interleaved else slice(half, turning)
    y = x.astype(np.float64)
    z = (y[..., first] + 1j * y[..., second]) * rotation
    y[..., first], y[..., second] = z.real, z.imag
    return y


@pytest.mark.parametrize(
    ("interleaved", "fraction", "where"),
    pairs([False, True], [1.0, 0.5], ["counted", "positions", "per sequence", "offset", "offsets"]),
)
def test_rope_turns_pairs(interleaved: bool, fraction: float, where: str) -> None:
    x = np.random.randn(2, 5, 3, 8).astype(np.float32)
    counted = np.arange(5)
    options, positions = {
        "counted": ({}, counted),
        "positions": ({"positions": jnp.asarray([4, 0, 2, 2, 9])}, np.array([4, 0, 2, 2, 9])),
        "per sequence": ({"positions": jnp.arange(10).reshape(2, 5)}, np.arange(10).reshape(2, 5)),
        "offset": ({"offset": 7}, counted + 7),
        "offsets": ({"offset": jnp.asarray([3, 11])}, counted + np.array([[3], [11]])),
    }[where]
    y = rope(jnp.asarray(x), interleaved=interleaved, fraction=fraction, **options)
    assert_close(where, y, expected(x, np.broadcast_to(positions, (2, 5)), int(8 * fraction), interleaved), 1e-6)


def test_features_beyond_the_fraction_keep_their_bits_and_bf16_is_rounded_once() -> None:
    x = np.random.randn(1, 4, 2, 8).astype(jnp.bfloat16)
    wide = x.astype(np.float32)
    y, expected = (np.asarray(jax.jit(partial(rope, fraction=0.5))(a)) for a in (x, wide))
    assert y.dtype == jnp.bfloat16 and (y[..., 4:] == x[..., 4:]).all()
    assert (y == expected.astype(jnp.bfloat16)).all()


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = (jnp.asarray(np.random.randn(1, 1, 1, 16).astype(np.float32)) for _ in range(2))
    score = jax.jit(lambda a, b: (rope(q, offset=a) * rope(k, offset=b)).sum())
    assert np.isclose(score(9, 4), score(25, 20), rtol=1e-4)


def test_invalid_arguments_give_a_clear_error() -> None:
    x = jnp.ones((2, 5, 1, 6))
    with pytest.raises(ValueError, match=r"0\.5 of 6 is 3; make it an even number"):
        rope(x, fraction=0.5)
    with pytest.raises(ValueError, match=r"fraction is 1\.5"):
        rope(x, fraction=1.5)
    with pytest.raises(ValueError, match=r"positions have shape \(4,\); x \(2, 5, 1, 6\) needs \(5,\) or \(2, 5\)"):
        rope(x, jnp.arange(4))
    with pytest.raises(ValueError, match=r"rope takes \[batch, tokens, heads, features\]"):
        rope(x[0])
