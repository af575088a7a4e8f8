"""Helpers of the kernels' tests: the device, and the comparison of two operands."""

import numpy as np
import torch

from quaver.torch.numerics.quantized import Quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_same(quantized: Quantized, expected: Quantized) -> None:
    """Compare codes, scales and shape bit for bit, and name the first element that differs; NaN equals NaN."""
    assert quantized.shape == expected.shape
    for name in ("codes", "scales"):
        ours, theirs = getattr(quantized, name)().cpu().numpy(), getattr(expected, name)().cpu().numpy()
        assert ours.shape == theirs.shape, name
        differs = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else ours != theirs
        if differs.any():
            at = tuple(np.argwhere(differs)[0])
            raise AssertionError(f"{differs.sum()} {name} differ, first at {at}: {ours[at]!r}, expected {theirs[at]!r}")


def assert_padded(q: Quantized) -> None:
    """Check that rows of eight-bit data have strides of a multiple of 16 bytes and end in zeros, for any k."""
    rows, k = q.data.shape
    stride = q.data.stride(0)
    assert q.data.stride(1) == 1
    assert stride == -(-k // 16) * 16
    base = q.data.as_strided((rows, stride), (stride, 1)).view(torch.uint8)
    assert not base[:, k:].any(), "what ends a row is not zero"
