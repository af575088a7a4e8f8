"""Rotary positions: pairs of a head's features turn by an angle that grows with the position.

Source: Su et al. 2021, arXiv:2104.09864; turning only the first features is GPT-NeoX's.
"""

import jax.numpy as jnp
from jax import Array

from quaver.jax.numerics.given import array


def angles(positions: Array, dim: int, theta: float = 10_000.0) -> Array:
    """positions theta^(-2i / dim) for i < dim / 2: float32 [..., dim / 2] from positions [...]."""
    half = dim // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    return positions.astype(jnp.float32)[..., None] * frequency


def rope(
    x: Array,
    positions: Array | None = None,
    *,
    offset: int | Array = 0,
    theta: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Array:
    """Turn the features of queries or keys by their positions.

    Args:
        x: [B, S, H, D].
        positions: [S] or [B, S]; None counts 0, 1, 2 ...
        offset: added to the positions, a number or [B]: how many tokens stand before, in a cache for example.
        theta: base of the frequencies.
        fraction: of the D features that turn, the first ones; the rest stay.
        interleaved: pairs are neighbours (0, 1), (2, 3) ...; else feature i goes with i + half.
    Returns:
        [B, S, H, D] in x's dtype, rounded once.
    Raises:
        ValueError: an odd number of features would turn, or shapes that do not fit.
    Bounded: relative RMS 1e-6 of float64 in float32, for positions whose angles float32 holds.
    """
    x = array("rope", "x", x)
    if x.ndim != 4:
        raise ValueError(f"rope takes [batch, tokens, heads, features], and got an array of shape {x.shape}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give the part of the features that turns, above 0 and up to 1")
    turning = int(x.shape[-1] * fraction)
    if turning % 2 or turning == 0:
        raise ValueError(
            f"rope turns pairs of features, and {fraction} of {x.shape[-1]} is {turning}; make it an even number"
        )
    if positions is None:
        positions = jnp.arange(x.shape[1])
    if positions.shape not in ((x.shape[1],), x.shape[:2]):
        raise ValueError(f"positions have shape {positions.shape}; x {x.shape} needs {x.shape[1:2]} or {x.shape[:2]}")
    shift = jnp.asarray(offset)
    positions = positions + (shift[:, None] if shift.ndim else shift)
    angle = angles(positions, turning, theta)
    angle = angle.reshape(-1, x.shape[1], 1, turning // 2)  # [1 or B, S, 1, turning / 2]
    turned = _turn(x[..., :turning].astype(jnp.float32), jnp.cos(angle), jnp.sin(angle), interleaved)
    return jnp.concatenate([turned.astype(x.dtype), x[..., turning:]], axis=-1)


def _turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
