"""Calls that cuDNN computes on a GPU, their arguments, and the reasons of the others."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks import attention as module
from quaver.jax.blocks.attention import attention
from quaver.jax.blocks.cudnn_attention import runs_on_gpu
from tests.close import assert_close

B, S, H, G, D = 2, 12, 4, 2, 8


def operands(dtype: Any = jnp.bfloat16, keys: int = S, dim: int = D) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = (B, S, H, dim), (B, keys, G, dim), (B, keys, G, dim)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


MASK = np.random.default_rng(3).random((B, 1, S, S)) < 0.5
MASK[1, :, 2] = True
BIAS = np.where(MASK, -np.inf, np.random.default_rng(4).standard_normal((B, H, S, S))).astype(np.float32)

SUPPORTED: dict[str, dict[str, Any]] = {
    "none": {},
    "causal and scale": {"mask_type": "causal", "scale": 0.3},
    "window": {"mask_type": "causal", "window": (4, 0)},
    "arbitrary": {"mask_type": "arbitrary", "mask": jnp.asarray(MASK)},
    "mask and bias": {"mask_type": "arbitrary", "mask": jnp.asarray(MASK[:, :, :, :1]), "bias": jnp.asarray(BIAS)},
    "bias": {"bias": jnp.asarray(BIAS[:1, :1])},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of cuDNN, which XLA's implementation of the same function computes here."""
    made: list[Any] = []
    plain = jax.nn.dot_product_attention

    def record(*args: Any, implementation: str, **options: Any) -> Any:
        assert implementation == "cudnn"
        made.append(options)
        return plain(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(module, "runs_on_gpu", lambda: True)
    yield made


@pytest.mark.parametrize("options", SUPPORTED.values(), ids=SUPPORTED)
def test_cudnn_gets_arguments_that_mean_the_same(options: dict[str, Any], calls: list[Any]) -> None:
    got = jax.jit(lambda *x: attention(*x, **options))(*operands())
    assert len(calls) == 1 and got.dtype == jnp.bfloat16
    expected = attention(*operands(jnp.float32), **options)
    assert len(calls) == 1
    assert_close("output", got.astype(jnp.float32), expected, 1e-2)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"soft_cap": 2.0}, {}),
        ({"sinks": "off_by_one"}, {}),
        ({"alibi_slopes": jnp.ones(H)}, {}),
        ({"dropout": 0.1, "dropout_key": jax.random.key(0, impl="unsafe_rbg")}, {}),
        ({"chunk": 3}, {}),
        ({"segment_ids": jnp.zeros((B, S), jnp.int32)}, {}),
        ({"mask_type": "padding", "mask": jnp.zeros((B, S), bool)}, {}),
        ({"mask_type": "causal_bottom_right"}, {"keys": 14}),
        ({"mask_type": "causal", "window": (4, 0)}, {"keys": 14}),
        ({"window": (4, 4)}, {}),
        ({"window": (4, -1)}, {}),
        ({}, {"dim": 6}),
        ({}, {"dim": 256}),
        ({}, {"dtype": jnp.float32}),
    ],
)
def test_other_calls_are_computed_in_chunks(options: dict[str, Any], shape: dict[str, Any], calls: list[Any]) -> None:
    jax.eval_shape(lambda *x: attention(*x, **options), *operands(**shape))
    assert not calls


def test_a_cpu_uses_no_cudnn() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert not runs_on_gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("options", SUPPORTED.values(), ids=SUPPORTED)
def test_cudnn_equals_the_chunks(options: dict[str, Any]) -> None:
    def both(dtype: Any) -> Any:
        def loss(*x: Any) -> Any:
            return (attention(*x, **options).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*operands(dtype))

    got, expected = (jax.tree.leaves(both(dtype)) for dtype in (jnp.bfloat16, jnp.float32))
    for a, b in zip(got, expected, strict=True):
        assert_close("cuDNN", a.astype(jnp.float32), b, 3e-2)
