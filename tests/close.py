"""Two ways to say that arrays are equal; a failure names the first wrong element and both values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

#: Values that read better as their bits.
FLOATS = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64, np.dtype(np.float16): np.uint16}


def assert_bitwise(a: Any, b: Any, what: str = "") -> None:
    """Same type, shape and bits, the sign of zero included; any NaN equals any NaN.

    Args:
        a: what was computed; an array or tensor.
        b: what it should be.
        what: put before the message.
    """
    prefix = f"{what}: " if what else ""
    if _is_tensor(a) and _is_tensor(b):
        assert a.dtype == b.dtype, f"{prefix}dtype {a.dtype}, expected {b.dtype}"
    x, y = _array(a), _array(b)
    assert x.dtype == y.dtype, f"{prefix}dtype {x.dtype}, expected {y.dtype}"
    assert x.shape == y.shape, f"{prefix}shape {x.shape}, expected {y.shape}"
    wrong = _bits(x) != _bits(y)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{prefix}element {at} is {_show(x[at])}, expected {_show(y[at])}; {wrong.sum()} of {wrong.size} differ"
        )


def assert_close(prefix: str, a: Any, b: Any, rms: float) -> None:
    """‖a - b‖ ≤ rms ‖b‖ in float64, with NaN and infinities in the same places.

    Args:
        prefix: put before the message.
        a: what was computed; an array or tensor.
        b: what it should be.
        rms: the bound.
    """
    x, y = _array(a).astype(np.float64), _array(b).astype(np.float64)
    assert x.shape == y.shape, f"{prefix}: shape {x.shape}, expected {y.shape}"
    finite = np.isfinite(y)
    odd = np.where(finite, ~np.isfinite(x), ~((x == y) | (np.isnan(x) & np.isnan(y))))
    if odd.any():
        at = tuple(int(i) for i in np.argwhere(odd)[0])
        raise AssertionError(f"{prefix}: element {at} is {x[at]!r}, expected {y[at]!r}; {odd.sum()} of {odd.size} such")
    error, size = np.where(finite, x, 0) - np.where(finite, y, 0), np.where(finite, y, 0)
    # In units of the largest, so that squares neither overflow nor vanish.
    unit = max(np.abs(size).max(initial=0), np.abs(error).max(initial=0)) or 1.0
    wrong, right = np.linalg.norm(error / unit), np.linalg.norm(size / unit)
    if wrong > rms * right:
        at = tuple(int(i) for i in np.unravel_index(np.abs(error).argmax(), error.shape))
        raise AssertionError(
            f"{prefix}: relative RMS {wrong / right if right else np.inf:.2e}, allowed {rms:.0e}; "
            f"furthest at {at}: {x[at]!r}, expected {y[at]!r}"
        )


def decibels(exact: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Signal to noise of each row, or of a whole vector: 20 log10(‖exact‖ / ‖got - exact‖)."""
    import torch

    exact, got = exact.double(), got.double()
    return 20 * torch.log10(exact.norm(dim=-1) / (got - exact).norm(dim=-1))


def _is_tensor(x: Any) -> bool:
    """Without importing torch, which processes of JAX need not wait for."""
    return "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor)


def _array(x: Any) -> np.ndarray:
    if _is_tensor(x):
        import torch

        x = x.detach().cpu()
        x = x.dequantize() if type(x).__name__ == "QuantizedTensor" else x
        narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
        return (x.float() if narrow else x).numpy()
    return np.asarray(x)


def _bits(x: np.ndarray) -> np.ndarray:
    if x.dtype not in FLOATS:
        return x
    return np.where(np.isnan(x), x.dtype.type(np.nan), x).view(FLOATS[x.dtype])


def _show(value: Any) -> str:
    if value.dtype in FLOATS:
        return f"{value!s} (bits {int(value.view(FLOATS[value.dtype])):#x})"
    return repr(value.item())
