"""The scan of Mamba-2 in JAX against the recurrence in float64, its convolution and gated norm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from quaver.jax.blocks.ssm import causal_conv1d, gated_rms_norm, last_tokens, ssd
from quaver.torch.nn.ssm.causal_conv import causal_conv1d as torch_conv1d
from quaver.torch.nn.ssm.chunked_scan import recurrence, steps_of
from quaver.torch.nn.ssm.gated_norm import GatedRMSNorm
from tests.close import assert_close

B, H, P, G, N = 2, 4, 8, 2, 12


def drawn(tokens: int, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """x, dt, A, B, C, D, dt_bias and the initial states."""
    rng = np.random.default_rng(tokens)
    shapes = ((B, tokens, H, P), (B, tokens, H), (H,), (B, tokens, G, N), (B, tokens, G, N), (H,), (H,), (B, H, P, N))
    x, dt, decay, *rest = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, dt, -scale * np.exp(decay), *rest


def scan(*args: Any, **options: Any) -> tuple[Any, Any]:
    return ssd(*args[:6], dt_bias=args[6], initial_states=args[7], **options)


@pytest.mark.parametrize(("tokens", "chunk", "scale"), [(150, None, 1.0), (1, None, 1.0), (48, 16, 1.0), (70, 33, 1e3)])
def test_a_scan_and_its_gradients_match_the_recurrence_in_float64(tokens: int, chunk: int | None, scale: float) -> None:
    """Whole and ragged chunks, and decays that forget at once."""
    args = drawn(tokens, scale)
    wide = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in args]
    x, dt, A, B_, C, D, bias, initial = wide
    y, last = recurrence(x, steps_of(dt, bias), A, B_, C, D, initial)
    factors = torch.tensor(np.random.default_rng(0).normal(size=y.shape))
    (y.mul(factors).sum() + last.square().sum()).backward()

    def loss(*args: Any) -> Any:
        y, last = scan(*args, chunk_size=chunk)
        return (y * jnp.asarray(factors.numpy(), jnp.float32)).sum() + jnp.square(last).sum(), (y, last)

    grads, (got, got_last) = jax.jit(jax.grad(loss, tuple(range(8)), has_aux=True))(*args)
    assert_close("y", got, y.detach().numpy(), 1e-6)
    assert_close("states", got_last, last.detach().numpy(), 1e-6)
    for name, a, b in zip(("x", "dt", "A", "B", "C", "D", "dt_bias", "initial"), grads, wide, strict=True):
        assert b.grad is not None
        assert_close(f"gradient of {name}", a, b.grad.float().numpy(), 2e-6)


def test_a_scan_continues_from_its_states() -> None:
    x, dt, A, B_, C, D, bias, initial = drawn(40)
    whole, last = scan(x, dt, A, B_, C, D, bias, initial)
    y, states = scan(x[:, :25], dt[:, :25], A, B_[:, :25], C[:, :25], D, bias, initial)
    rest, states = scan(x[:, 25:], dt[:, 25:], A, B_[:, 25:], C[:, 25:], D, bias, states)
    assert_close("y", jnp.concatenate([y, rest], 1), whole, 1e-6)
    assert_close("states", states, last, 1e-6)


def test_a_scan_of_no_tokens_returns_its_states() -> None:
    x, dt, A, B_, C, D, bias, initial = drawn(0)
    y, last = scan(x, dt, A, B_, C, D, bias, initial)
    assert y.shape == x.shape
    np.testing.assert_array_equal(last, initial)


def test_nan_stays_in_its_sequence_and_does_not_reach_earlier_chunks() -> None:
    x, dt, *rest = drawn(48)
    x[0, 20, 0, 0] = np.nan
    y, _ = scan(x, dt, *rest, chunk_size=16)
    assert np.isfinite(y[1]).all() and np.isfinite(y[0, :16]).all() and np.isnan(y[0, 20:, 0]).any()


def test_limits_of_steps_clamp_them() -> None:
    args = drawn(20)
    wide = [torch.tensor(a, dtype=torch.float64) for a in args]
    limit = (0.1, 0.5)
    right, _ = recurrence(wide[0], steps_of(wide[1], wide[6], True, limit), *wide[2:6], wide[7])
    assert_close("y", scan(*args, dt_limit=limit)[0], right.numpy(), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_convolution_is_that_of_torch(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, kernel, bias, initial = (rng.normal(size=s).astype(np.float32) for s in ((2, 9, 6), (4, 1, 6), (6,), (2, 3, 6)))
    tokens = torch.tensor(x).to(getattr(torch, dtype))
    weight = torch.tensor(kernel).permute(2, 1, 0).squeeze(1)
    right = torch_conv1d(tokens, weight, torch.tensor(bias), initial=torch.tensor(initial).to(tokens.dtype))
    got = causal_conv1d(jnp.asarray(x, dtype), kernel, bias, initial=initial)
    assert got.dtype == dtype
    assert_close("y", got.astype(jnp.float32), right.float().numpy(), 1e-6 if dtype == "float32" else 2e-3)
    np.testing.assert_array_equal(last_tokens(jnp.asarray(x[:, :2]), 4, initial)[:, 0], initial[:, 2])


@pytest.mark.parametrize("first", [False, True])
def test_a_gated_norm_is_that_of_torch(first: bool) -> None:
    rng = np.random.default_rng(0)
    x, gate, scale = (rng.normal(size=s).astype(np.float32) for s in ((5, 12), (5, 12), (12,)))
    norm = GatedRMSNorm(12, 3, norm_before_gate=first)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(scale))
    right = norm(torch.tensor(x), torch.tensor(gate)).detach().numpy()
    assert_close("y", gated_rms_norm(x, gate, scale, groups=3, norm_before_gate=first), right, 1e-6)


def test_wrong_shapes_and_options_raise_errors() -> None:
    x, dt, A, B_, C, *_, initial = drawn(8)
    for args, options, message in (
        ((x, dt[:, 1:], A, B_, C), {}, r"give \[B, T, H, P\], \[B, T, H\] and \[H\]"),
        ((x, dt, A, B_[:, :, :0], C[:, :, :0]), {}, "with G that divides H"),
        ((x, dt, A, B_, C), {"initial_states": initial[1:]}, "initial_states is"),
        ((x, dt, A, B_, C), {"chunk_size": 257}, "chunk_size is 257"),
    ):
        with pytest.raises(ValueError, match=message):
            ssd(*map(jnp.asarray, args), **options)
    with pytest.raises(ValueError, match="activation 'swiglu' takes two arrays"):
        causal_conv1d(x[..., 0], jnp.ones((4, 1, H)), activation="swiglu")
