"""NVFP4 whose tensor factor is no power of two stores Transformer Engine's codes: its formulas, implemented again.

Source: the order of operations of Transformer Engine's NVFP4 quantizers (transformer_engine/common/cast/nvfp4),
with ml_dtypes' casts in place of its own.
"""

from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver import E2M1, QuantSpec, reference
from tests.close import assert_bitwise

SPEC = QuantSpec(E2M1, (1, 16), "two_level_fp32")
SIDE, ONE = 1024, np.float32(1)


def transformer_engine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 codes [rows, k] and E4M3 block scales [rows, k / 16] of float32 x whose scales are not 0."""
    encode = np.float32(448 * 6) / np.abs(x).max()
    decode = ONE / encode
    groups = x.reshape(len(x), -1, 16)
    scale = np.minimum(np.abs(groups).max(2) * (encode * np.float32(1 / 6)), np.float32(448)).astype(
        ml_dtypes.float8_e4m3fn
    )
    assert scale.astype(np.float32).all()
    factor = ONE / (scale.astype(np.float32) * decode)
    y = np.clip(groups * factor[..., None], -6, 6)
    return y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape) & 15, scale.astype(np.float32)


def inputs(seed: int, side: int = SIDE) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(side, side)) * 3.7**seed
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _plain(x: np.ndarray) -> np.ndarray:
    return reference.quantize(x, SPEC).codes()


def _torch(implementation: str) -> Callable[[np.ndarray], np.ndarray]:
    def codes(x: np.ndarray) -> np.ndarray:
        with qt.only(implementation):
            return qt.quantize(torch.from_numpy(x).bfloat16(), SPEC).codes().numpy()

    return codes


def _jax(x: np.ndarray) -> np.ndarray:
    return np.asarray(qj.quantize(jnp.asarray(x, jnp.bfloat16), SPEC).codes())


@pytest.mark.parametrize(
    "codes, side",
    [(_plain, SIDE), (_torch("reference"), SIDE), (_torch("cpu_fp4"), SIDE), (_torch("triton"), 128), (_jax, SIDE)],
    ids=["numpy", "torch", "cpu_fp4", "triton", "jax"],
)
def test_no_code_differs_from_transformer_engines(codes: Callable[[np.ndarray], np.ndarray], side: int) -> None:
    for seed in (0, 7):
        x = inputs(seed, side)
        assert_bitwise(codes(x), transformer_engine(x)[0], f"seed {seed}")
