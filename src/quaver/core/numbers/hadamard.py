"""The fixed 16-point rotation of NVFP4's weight gradient: both operands turn, their product stays, outliers spread.

Source: NVIDIA, arXiv:2509.25149, appendix C; the signs are Transformer Engine's.
"""

import numpy as np

GROUP = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotate groups of 16 along the last axis, the tail padded with zeros.

    Args:
        x: float32 [rows, k].
    Returns:
        float32 [rows, ceil16(k)]: signs, four butterfly stages of stride 1, 2, 4, 8 (a + b, a - b), a quarter of it.
    Exact: every stage is rounded to float32, in this order.
    """
    rows, k = x.shape
    groups = -(-k // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :k] = x
    with np.errstate(over="ignore", invalid="ignore"):
        y = padded.reshape(rows, groups, GROUP) * np.array(SIGNS, np.float32)
        for stride in (1, 2, 4, 8):
            pairs = y.reshape(rows, groups, GROUP // (2 * stride), 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([a + b, a - b], -2).reshape(rows, groups, GROUP)
        return (y * np.float32(0.25)).reshape(padded.shape)
