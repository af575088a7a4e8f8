"""The plain attention against loops in float64 and against the JAX twin."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.attention import attention
from tests.close import assert_close
from tests.torch.nn.attention.cases import (
    GROUPS,
    MASK_TYPES,
    B,
    D,
    H,
    cases,
    expected,
    gradients,
    hides,
    mask_of,
    operands,
)


def reference(*args: Tensor, **options: Any) -> Tensor:
    with qt.only("reference"):
        return attention(*args, **options)


@pytest.mark.parametrize("mask_type, window, queries, keys", cases())
def test_every_mask_and_window_equals_a_loop(mask_type: str, window: Any, queries: int, keys: int) -> None:
    mask = mask_of(mask_type, queries, keys)
    hidden = hides(mask_type, window, queries, keys, mask)
    for groups in GROUPS:
        q, k, v = operands(queries, keys, groups)
        y = reference(q, k, v, mask_type=mask_type, mask=mask, window=window)
        assert_close(f"{groups} groups", y, expected(q, k, v, hidden), 1e-6)


def test_float64_stays_float64() -> None:
    q, k, v = operands(5, 7, dtype=torch.float64)
    y = reference(q, k, v, mask_type="causal")
    assert y.dtype is torch.float64
    assert_close("float64", y, expected(q, k, v, hides("causal", None, 5, 7, None)), 1e-14)
    assert torch.autograd.gradcheck(lambda *x: reference(*x, mask_type="causal", sinks="off_by_one"), (q, k, v))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"soft_cap": 0.7},
        {"bias": torch.linspace(-2, 2, H * 5 * 7).reshape(1, H, 5, 7)},
        {"sinks": torch.tensor([-1.0, 0.0, 0.5, 3.0])},
        {"soft_cap": 0.5, "bias": torch.linspace(-1, 1, 7), "sinks": torch.tensor([-1.0, 0.0, 0.5, 3.0]), "scale": 2.0},
    ],
)
def test_the_options_equal_a_loop(options: dict[str, Any]) -> None:
    q, k, v = operands(5, 7)
    y = reference(q, k, v, mask_type="causal", **options)
    plain = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    assert_close(str(list(options)), y, expected(q, k, v, hides("causal", None, 5, 7, None), **plain), 1e-6)


def test_off_by_one_softmax_is_a_sink_of_logit_zero() -> None:
    q, k, v = operands(5, 7)
    assert torch.equal(reference(q, k, v, sinks="off_by_one"), reference(q, k, v, sinks=torch.zeros(H)))


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_it_equals_the_jax_twin_with_gradients(mask_type: str) -> None:
    jax = pytest.importorskip("jax")
    from quaver.jax.blocks.attention import attention as cached_transpose

    q, k, v = operands(5, 7)
    mask = mask_of(mask_type, 5, 7)
    theirs = tuple(m.numpy() for m in mask) if isinstance(mask, tuple) else None if mask is None else mask.numpy()
    bias = torch.linspace(-1, 1, H * 5 * 7).reshape(1, H, 5, 7)
    options = {"mask_type": mask_type, "window": (3, 0), "soft_cap": 2.0, "scale": 0.4}
    ours = reference(q, k, v, mask=mask, bias=bias, **options)
    y, pull = jax.vjp(
        lambda *x: cached_transpose(*x, mask=theirs, bias=bias.numpy(), **options),
        *(x.detach().numpy() for x in (q, k, v)),
    )
    assert_close("output", ours, y, 1e-6)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    for name, a, b in zip("qkv", gradients(ours, q, k, v), pull(weights.numpy()), strict=True):
        assert_close(name, a, b, 2e-6)


@pytest.mark.parametrize("sinks", [None, torch.zeros(H), "off_by_one"])
def test_a_query_that_sees_no_key_gets_zero_and_so_do_its_gradients(sinks: Any) -> None:
    q, k, v = operands(5, 7)
    slopes = torch.full((H,), 0.1, requires_grad=True)
    mask = torch.zeros(B, 1, 5, 7, dtype=torch.bool)
    mask[0, :, 2] = True
    y = reference(q, k, v, mask_type="arbitrary", mask=mask, sinks=sinks, alibi_slopes=slopes)
    assert not y[0, 2].any()
    grads = gradients(y, q, k, v, slopes)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][0, 2].any()


def test_learnable_sinks_have_the_gradient_of_differences() -> None:
    q, k, v = operands(5, 7, dtype=torch.float64)
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    mask = mask_of("arbitrary", 5, 7)
    assert torch.autograd.gradcheck(
        lambda s: reference(q.detach(), k.detach(), v.detach(), mask_type="arbitrary", mask=mask, sinks=s), (sinks,)
    )


def test_dropout_keeps_the_mean_and_drops_the_given_fraction() -> None:
    q, k = torch.zeros(1, 64, H, D), torch.zeros(1, 64, H, D)
    v = torch.eye(64)[None, :, None].expand(1, 64, H, 64)
    probabilities = reference(q, k, v, dropout=0.25) * 64
    assert set(np.unique(probabilities.numpy().round(4))) == {0.0, np.float32(4 / 3).round(4)}
    assert abs((probabilities == 0).float().mean().item() - 0.25) < 0.02


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_a_bias_of_minus_infinity_hides_as_a_mask_does(name: str) -> None:
    q, k, v = operands(7, 7)
    mask = mask_of("arbitrary", 7, 7)
    bias = torch.zeros(mask.shape).masked_fill_(mask, -torch.inf)
    with qt.only(name):
        results = [attention(q, k, v, bias=bias), attention(q, k, v, mask_type="arbitrary", mask=mask)]
    for one, other in zip(*((y, *gradients(y, q, k, v)) for y in results), strict=True):
        assert_close(name, one, other, 1e-6)
