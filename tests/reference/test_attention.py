"""Test the specification of quantized attention: formulas against float64, operands, edge cases."""

from typing import Any

import numpy as np
import pytest

from quaver.recipes import RECIPES, get
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import AttentionSpec, QuantSpec
from quaver.reference import quantize
from quaver.reference.attention import attention, attention_backward, attention_head, attention_head_backward
from quaver.reference.numerics import magnitudes
from tests.close import assert_bitwise, assert_close

SPECS = {
    name: spec
    for name in RECIPES
    if name != "bf16" and (spec := get(name, attention=True).attention) is not None and name not in ("delayed", "nvfp4")
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
B, H, G, SQ, SK, D, DV = 2, 4, 2, 5, 7, 40, 6


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(seed)
    shapes = (B, H, SQ, D), (B, G, SK, D), (B, G, SK, DV), (B, H, SQ, DV)
    return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)  # type: ignore[return-value]


def options(seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    hidden = rng.random((B, 1, SQ, SK)) < 0.4
    hidden[0, :, 2] = True
    bias, sinks = rng.normal(size=(H, SQ, SK)).astype(np.float32), rng.normal(size=H).astype(np.float32)
    return {"hidden": hidden, "bias": bias, "soft_cap": 2.0, "sinks": sinks, "scale": 0.3}


def float64_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: Any, bias: Any, soft_cap: float, sinks: Any, scale: float
) -> np.ndarray:
    k, v = (np.repeat(x, H // G, 1) for x in (k, v))
    scores = soft_cap * np.tanh(q.astype(np.float64) @ k.swapaxes(2, 3) * scale / soft_cap) + bias
    weights = np.where(hidden, 0, np.exp(scores))
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
    return weights / np.where(total == 0, 1, total) @ v


def slope(function: Any, arguments: tuple[np.ndarray, ...], which: int, grad: np.ndarray) -> np.ndarray:
    """The gradient of sum(function * grad) by one argument, from differences."""
    wide = [np.array(a, np.float64) for a in arguments]
    gradient = np.zeros(wide[which].shape)
    for at in np.ndindex(gradient.shape):
        before = wide[which][at]
        wide[which][at] = before + 1e-5
        up = (function(*wide) * grad).sum()
        wide[which][at] = before - 1e-5
        gradient[at] = (up - (function(*wide) * grad).sum()) / 2e-5
        wide[which][at] = before
    return gradient


def on_the_grid(x: np.ndarray) -> np.ndarray:
    """Values that quantizing changes by nothing, whatever the block: one power of two, or 0."""
    return np.where(np.abs(x) < 0.3, 0, np.sign(x)).astype(np.float32)


def test_lossless_rounding_gives_plain_attention() -> None:
    q, k, v, _ = (on_the_grid(x) for x in operands())
    # One key a query: its probability is 1.
    hidden = np.arange(SK) != (np.arange(SQ) % SK)[:, None]
    got = attention(q, k, v, SPECS["tensorwise"], hidden=hidden)
    assert_bitwise(got, np.repeat(v, H // G, 1)[:, :, np.arange(SQ) % SK])


@every_spec
def test_the_output_is_attention_within_eight_bits(spec: AttentionSpec) -> None:
    q, k, v, _ = operands()
    assert_close("output", attention(q, k, v, spec, **options()), float64_attention(q, k, v, **options()), 0.06)


@every_spec
def test_the_gradients_match_attention_within_eight_bits(spec: AttentionSpec) -> None:
    q, k, v, g = operands()
    own = options()
    bias, sinks = np.broadcast_to(own.pop("bias"), (B, H, SQ, SK)), own.pop("sinks")

    def formula(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> np.ndarray:
        return float64_attention(q, k, v, bias=bias, sinks=sinks, **own)

    got = attention_backward(g, q, k, v, spec, bias=bias, sinks=sinks, **own)
    for which, name in enumerate(("dq", "dk", "dv", "dbias", "dsinks")):
        exact = slope(formula, (q, k, v, bias, sinks), which, g)
        assert_close(name, got[which], exact, 0.2 if name != "dv" else 0.1)


@every_spec
def test_every_operand_is_quantized_along_the_axis_that_is_summed(spec: AttentionSpec) -> None:
    q, k, v, g = (x[0, 0] for x in operands())
    head = attention_head(q, k, v, spec)
    backward = attention_head_backward(g, head, q, k, v, spec)
    inputs = {"q": q, "k": k, "vt": v.T, "v": v, "kt": k.T, "qt": q.T}
    for name, x in (inputs | {"do": g, "dot": g.T}).items():
        want = quantize(x, spec.input if name in inputs else spec.grad_output)
        got = getattr(head, name, None) or getattr(backward, name)
        assert_bitwise(got.codes(), want.codes(), name)
        assert_bitwise(got.scales(), want.scales(), name)
    assert backward.ds.spec == backward.dst.spec == spec.grad_output
    assert backward.ds.data.shape == (SQ, SK) and backward.dst.data.shape == (SK, SQ)


def test_probabilities_are_e4m3_times_256_before_the_scaling_of_dropout() -> None:
    q, k, v, _ = (x[0, 0] for x in operands())
    keep = np.random.default_rng(2).random((SQ, SK)) < 0.5
    head = attention_head(q, k, v, SPECS["mxfp8"], keep=keep, dropout=0.5)
    assert_bitwise(head.p.scales(), np.full((1, 1), 2.0**-8, np.float32))
    grid = magnitudes(E4M3)
    assert np.isin(head.p.data, grid).all() and (head.p.data[~keep] == 0).all()
    nearest = np.abs(head.p.data - head.probabilities * 256)[keep]
    assert (nearest <= np.abs(head.probabilities[..., None] * 256 - grid[:-1]).min(-1)[keep]).all()
    assert_close("kept", head.out, 2 * (head.p.dequantize().astype(np.float64) @ head.vt.dequantize().T), 1e-6)


def test_the_scores_gradient_takes_the_softmax_before_it_was_quantized() -> None:
    q, k, v, g = (x[0, 0] for x in operands())
    spec = SPECS["mxfp8"]
    head = attention_head(q, k, v, spec)
    backward = attention_head_backward(g, head, q, k, v, spec)
    dp = backward.do.dequantize().astype(np.float64) @ backward.v.dequantize().T
    wide = head.probabilities.astype(np.float64)
    want = wide * (dp - (wide * dp).sum(-1, keepdims=True))
    assert np.abs(want.sum(-1)).max() < 1e-6 * np.abs(want).max()
    assert_close("dS", backward.dbias, want, 1e-12)
    assert_bitwise(backward.ds.codes(), quantize(want.astype(np.float32), spec.grad_output).codes())


@every_spec
def test_a_query_that_sees_nothing_gives_0_and_no_gradient(spec: AttentionSpec) -> None:
    q, k, v, g = operands()
    hidden = np.zeros((SQ, SK), bool)
    hidden[3] = True
    out = attention(q, k, v, spec, hidden=hidden)
    dq, dk, dv, dbias, _ = attention_backward(g, q, k, v, spec, hidden=hidden)
    assert (out[:, :, 3] == 0).all() and (dq[:, :, 3] == 0).all() and (dbias[:, :, 3] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


def test_a_nan_in_a_row_of_q_spoils_its_query_alone_where_rows_have_scales() -> None:
    q, k, v, _ = operands()
    q[0, 1, 2, 3] = np.nan
    out = attention(q, k, v, SPECS["rowwise"])
    spoilt = np.isnan(out).all(-1)
    assert spoilt[0, 1, 2] and spoilt.sum() == 1 and not np.isnan(out[~spoilt]).any()
    whole = np.isnan(attention(q, k, v, SPECS["tensorwise"])).all((2, 3))
    assert whole[0, 1] and whole.sum() == 1


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_an_overflow_is_not_made_finite(odd: float) -> None:
    for name in ("k", "v"):
        arrays = dict(zip("qkv", operands()[:3], strict=True))
        arrays[name][1, 0, 0, 0] = odd
        out = attention(**arrays, spec=SPECS["mxfp8"])
        assert np.isnan(out[1, : H // G]).any() and np.isfinite(out[0]).all() and np.isfinite(out[1, H // G :]).all()


def test_empty_operands() -> None:
    spec = AttentionSpec(QuantSpec(E4M3, (1, 32)), QuantSpec(E4M3))
    for queries, keys in ((0, 3), (3, 0), (0, 0)):
        q, k, v, g = np.ones((1, 2, queries, 4)), np.ones((1, 1, keys, 4)), np.ones((1, 1, keys, 5)), None
        out = attention(q, k, v, spec)
        assert out.shape == (1, 2, queries, 5) and (out == 0).all()
        g = np.ones_like(out)
        assert [x.shape for x in attention_backward(g, q, k, v, spec)[:3]] == [q.shape, k.shape, v.shape]
