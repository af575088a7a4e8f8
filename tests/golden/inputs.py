"""Inputs that have the same bits on every machine: whole numbers times powers of two, computed without rounding."""

import numpy as np


def values(*shape: int, seed: int = 0, hard: bool = False) -> np.ndarray:
    """float32 of this shape: 0, or magnitudes from 2**-9 to 4; each column has a power of two of its own.

    Args:
        hard: the first eight elements are zeros of both signs, subnormals, outliers and the like.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    whole = draw.integers(-255, 256, shape).astype(np.float32)
    size = np.float32(2.0) ** draw.integers(-9, -5, shape[-1:]).astype(np.float32)
    x = whole * size
    if hard and x.size >= 8:
        flat = x.reshape(-1)
        flat[:8] = [0.0, -0.0, 1e-40, -(2.0**-126), 448.0 * 64, 3e38, -1.0, 2.0**-20]
    return x
