"""LayerNorm and RMSNorm against the same formula in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks.layers import NORMALIZATIONS, layer_norm, normalize, rms_norm
from tests.close import assert_close
from tests.pairs import pairs


def expected(
    x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None, kind: str, eps: float, zero_centered: bool
) -> np.ndarray:
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True) if kind == "LayerNorm" else x
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * (scale + zero_centered)
    return y if bias is None else y + bias


@pytest.mark.parametrize(("kind", "zero_centered", "with_bias"), pairs(NORMALIZATIONS, [False, True], [False, True]))
def test_a_norm_matches_its_formula(kind: str, zero_centered: bool, with_bias: bool) -> None:
    x, scale, bias = np.random.randn(3, 5, 24) * 3 + 1, np.random.randn(24), np.random.randn(24)
    x, scale, bias = x.astype(np.float32), scale.astype(np.float32), bias.astype(np.float32) if with_bias else None
    norm = jax.jit(partial(normalize, normalization=kind, eps=1e-3, zero_centered=zero_centered))
    y = norm(x, scale, bias)
    assert_close(kind, y, expected(x, scale, bias, kind, 1e-3, zero_centered), 1e-6)


def test_a_bf16_norm_is_computed_in_float32_and_rounded_once() -> None:
    x = (np.random.randn(4, 64) * 100).astype(jnp.bfloat16)
    y = jax.jit(layer_norm)(x, np.ones(64, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert (np.asarray(y) == np.asarray(jax.jit(layer_norm)(x.astype(np.float32))).astype(jnp.bfloat16)).all()


def test_a_row_of_zeros_stays_zero_and_nan_spoils_only_its_row() -> None:
    x = np.random.randn(3, 8).astype(np.float32)
    x[0], x[1, 2] = 0, np.nan
    for norm in (layer_norm, rms_norm):
        y = np.asarray(jax.jit(norm)(x))
        assert (y[0] == 0).all() and np.isnan(y[1]).all() and np.isfinite(y[2]).all()


def test_invalid_arguments_give_a_clear_error() -> None:
    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"scale has shape \(7,\), and x \(2, 8\) needs \(8,\)"):
        layer_norm(x, jnp.ones(7))
    with pytest.raises(ValueError, match=r"normalization is 'layernorm'; give one of 'LayerNorm', 'RMSNorm'"):
        normalize(x, None, None, normalization="layernorm")
