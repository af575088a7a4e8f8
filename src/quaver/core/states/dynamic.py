"""The dynamic map of eight-bit optimizers: 256 values from ±1e-6 to 1, in each decade twice as many as in the last.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.2 and appendix.
"""

from functools import cache

import numpy as np

DECADES = 7


@cache
def levels(signed: bool) -> np.ndarray:
    """All values in ascending order, by which codes count: float32 [256]. With a sign 1 is there and -1 is not."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade + 1 - DECADES) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values)).astype(np.float32)


@cache
def boundaries(signed: bool) -> np.ndarray:
    """Halfway between neighbours: a value above one belongs to the code above it. float32 [255]."""
    table = levels(signed)
    return (table[1:] + table[:-1]) * np.float32(0.5)
