"""What the kernels' tests share: where they run, and how two operands are compared."""

import numpy as np
import torch

from quaver.torch.quantized import Quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_same(found: Quantized, expected: Quantized) -> None:
    """Codes, scales and shape bit for bit, naming the first element that differs; NaN equals NaN."""
    assert found.shape == expected.shape
    for name in ("codes", "scales"):
        ours, theirs = getattr(found, name)().cpu().numpy(), getattr(expected, name)().cpu().numpy()
        assert ours.shape == theirs.shape, name
        differs = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else ours != theirs
        if differs.any():
            at = tuple(np.argwhere(differs)[0])
            raise AssertionError(f"{differs.sum()} {name} differ, first at {at}: {ours[at]!r}, expected {theirs[at]!r}")
