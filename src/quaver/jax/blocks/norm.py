"""LayerNorm and RMSNorm over the last axis, computed in float32 whatever the operands are."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.numerics.given import array

T = TypeVar("T")


def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6, zero_centered: bool = False
) -> Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias.

    Args:
        x: [..., d].
        scale: [d], also called gamma; None multiplies by one.
        bias: [d], also called beta; None adds nothing.
        eps: added to the variance.
        zero_centered: multiply by 1 + scale, so that a scale of 0 does nothing.
    Returns:
        [..., d] in x's dtype, rounded once.
    Raises:
        ValueError: scale or bias is not [d].
    Bounded: relative RMS 1e-6 of float64 in float32. NaN and infinities make their row NaN.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    x = array("layer_norm", "x", x)
    _check(x, scale=scale, bias=bias)
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return _finish(x, centred, scale, bias, eps, zero_centered)


def rms_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6, zero_centered: bool = False
) -> Array:
    """x / sqrt(mean(x²) + eps) * scale; arguments and result as those of `layer_norm`.

    Bounded: relative RMS 1e-6 of float64 in float32.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; the zero-centred scale is Gemma's.
    """
    x = array("rms_norm", "x", x)
    _check(x, scale=scale, bias=bias)
    return _finish(x, x.astype(jnp.float32), scale, bias, eps, zero_centered)


#: The kinds of normalization by the name that modules take.
NORMALIZATIONS = {"LayerNorm": layer_norm, "RMSNorm": rms_norm}


def normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Array:
    """The normalization of this name."""
    return named(normalization, NORMALIZATIONS)(x, scale, bias, eps=eps, zero_centered=zero_centered)


def named(normalization: str, kinds: Mapping[str, T]) -> T:
    """The function, or the module, of a normalization of this name.

    Raises:
        ValueError: there is none.
    """
    if normalization not in kinds:
        raise ValueError(f"normalization is {normalization!r}; give one of {', '.join(map(repr, kinds))}")
    return kinds[normalization]


def _finish(
    x: Array, centred: Array, scale: Array | None, bias: Array | None, eps: float, zero_centered: bool
) -> Array:
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    if scale is not None:
        y = y * (scale.astype(jnp.float32) + (1.0 if zero_centered else 0.0))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _check(x: Array, **vectors: Array | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"the norm's {name} has shape {vector.shape}, and x {x.shape} needs {x.shape[-1:]}")
