"""Specs of optimizer states, and numbers that are hard to write in few bits, for every framework's tests."""

from itertools import product

import numpy as np

from quaver.reference.optimizer_state import CODES, SCALES, StateSpec

HARD = np.array(
    [0, -0.0, 1e-45, -1e-40, 1e-38, 2.0**-126, -1, 1.5, 448, 65504, 1e30, -3.4e38, np.inf, -np.inf, np.nan], np.float32
)
KINDS = ("normal", "hard", "tiny", "wide", "bits")


def every_spec(blocks: tuple[int | None, ...] = (64, 16, None)) -> list[StateSpec]:
    specs = []
    for code, scale, block, stochastic, floor in product(CODES, SCALES, blocks, (False, True), (False, True)):
        if not CODES[code].scaled and (scale, block) != ("bfloat16", blocks[0]):
            continue
        try:
            specs.append(StateSpec(code=code, scale=scale, block=block, stochastic=stochastic, floor=floor))
        except ValueError:
            continue
    return specs


def drawn(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 numbers of one of `KINDS`."""
    if kind == "normal":
        x = rng.standard_normal(shape) * np.exp(5 * rng.standard_normal(shape))
    elif kind == "hard":
        x = rng.choice(HARD, shape)
    elif kind == "tiny":
        # Around the smallest normal number and the smallest amax that has a scale of E4M3 and of its root.
        x = rng.standard_normal(shape) * rng.choice(np.float32([1e-37, 1e-36, 1e-35, 1e-33, 1e-43]), shape)
    elif kind == "wide":
        # One in thirty is so large that the ratio of the others to it is subnormal.
        x = rng.standard_normal(shape) * np.where(rng.random(shape) < 1 / 30, 1e4, 10.0 ** rng.uniform(-41, -30, shape))
    else:
        x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32) if shape else np.float32(3)
    return np.asarray(x, np.float32)
