"""Attention against plain loops in float64, for every mask."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks.attention import attention
from quaver.reference.attention import MASKS
from tests.close import assert_close
from tests.pairs import alternating

B, SQ, SK, H, G, D, DV = 2, 5, 7, 4, 2, 8, 6


def operands(seed: int = 0, queries: int = SQ, groups: int = G) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = (B, queries, H, D), (B, SK, groups, D), (B, SK, groups, DV)
    return tuple(random.standard_normal(s).astype(np.float32) for s in shapes)  # type: ignore[return-value]


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray, bias: Any = 0.0, scale: Any = None, cap: Any = None
) -> np.ndarray:
    """hidden: [B, Sq, Sk], True where a query may not see a key."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    bias = np.broadcast_to(bias, (B, H, q.shape[1], SK))
    for b, i, h in np.ndindex(q.shape[:3]):
        group = h // (H // k.shape[2])
        s = k[b, :, group] @ q[b, i, h] * (1 / math.sqrt(D) if scale is None else scale)
        s = s if cap is None else cap * np.tanh(s / cap)
        s = s + bias[b, h, i]
        seen = ~hidden[b, i]
        if seen.any():
            p = np.exp(s[seen] - s[seen].max())
            out[b, i, h] = p / p.sum() @ v[b, seen, group]
    return out


def pairs(rule: Any) -> np.ndarray:
    return np.array([[[rule(b, i, j) for j in range(SK)] for i in range(SQ)] for b in range(B)], bool)


#: Sequence lengths of the padded cases; the rest is padding.
OF_QUERIES, OF_KEYS = (4, 5), (6, 3)
PADDING = np.arange(SQ) >= np.array(OF_QUERIES)[:, None], np.arange(SK) >= np.array(OF_KEYS)[:, None]
ARBITRARY = np.random.default_rng(3).random((B, 1, SQ, SK)) < 0.5
ARBITRARY[1, :, 2] = True


def padded(b: int, i: int, j: int) -> bool:
    return i >= OF_QUERIES[b] or j >= OF_KEYS[b]


HIDDEN = {
    "none": pairs(lambda b, i, j: False),
    "causal": pairs(lambda b, i, j: j > i),
    "causal_bottom_right": pairs(lambda b, i, j: j > i + SK - SQ),
    "padding": pairs(padded),
    "padding_causal": pairs(lambda b, i, j: padded(b, i, j) or j > i),
    "padding_causal_bottom_right": pairs(lambda b, i, j: padded(b, i, j) or j > i + OF_KEYS[b] - OF_QUERIES[b]),
    "arbitrary": ARBITRARY[:, 0],
}


def mask_of(mask_type: str) -> Any:
    if mask_type == "arbitrary":
        return jnp.asarray(ARBITRARY)
    return tuple(map(jnp.asarray, PADDING)) if mask_type.startswith("padding") else None


@pytest.mark.parametrize(("mask_type", "groups"), alternating(MASKS, [4, 2, 1], ["causal"]))
def test_every_mask_hides_the_named_positions(mask_type: str, groups: int) -> None:
    q, k, v = operands(groups=groups)
    y = attention(*map(jnp.asarray, (q, k, v)), mask_type=mask_type, mask=mask_of(mask_type))
    assert_close(mask_type, y, expected(q, k, v, HIDDEN[mask_type]), 1e-6)


@pytest.mark.parametrize(
    ("window", "mask_type"),
    alternating(
        [(2, 0), (1, 1), (-1, 2), (3, -1), (-1, -1), (0, 0)],
        ["none", "causal", "causal_bottom_right", "padding_causal_bottom_right"],
        [(2, 0)],
    ),
)
def test_a_window_is_counted_from_the_aligned_position(mask_type: str, window: tuple[int, int]) -> None:
    if "causal" in mask_type:
        window = window[0], min(window[1], 0)
    q, k, v = operands()

    def outside(b: int, i: int, j: int) -> bool:
        shift = {"causal_bottom_right": SK - SQ, "padding_causal_bottom_right": OF_KEYS[b] - OF_QUERIES[b]}
        away = j - i - shift.get(mask_type, 0)
        return (window[0] >= 0 and -away > window[0]) or (window[1] >= 0 and away > window[1])

    y = attention(*map(jnp.asarray, (q, k, v)), mask_type=mask_type, mask=mask_of(mask_type), window=window)
    assert_close(f"{mask_type} {window}", y, expected(q, k, v, HIDDEN[mask_type] | pairs(outside)), 1e-6)


def test_bias_scale_and_soft_cap() -> None:
    q, k, v = operands()
    bias = np.random.randn(1, H, SQ, SK).astype(np.float32)
    y = attention(*map(jnp.asarray, (q, k, v)), mask_type="causal", bias=jnp.asarray(bias), scale=0.7, soft_cap=1.5)
    assert_close("all three", y, expected(q, k, v, HIDDEN["causal"], bias, 0.7, 1.5), 1e-6)


def test_one_padding_mask_applies_to_queries_and_keys() -> None:
    q, k, v = operands(queries=SK)
    mask = jnp.asarray(PADDING[1])
    y = attention(*map(jnp.asarray, (q, k, v)), mask_type="padding", mask=mask)
    both = attention(*map(jnp.asarray, (q, k, v)), mask_type="padding", mask=(mask, mask))
    assert (y == both).all() and (y[1, OF_KEYS[1] :] == 0).all()


def test_gradients_match_the_formula_and_hidden_rows_give_none() -> None:
    q, k, v = map(jnp.asarray, operands())
    direction = jnp.asarray(np.random.randn(B, SQ, H, DV), jnp.float32)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, mask: Any) -> Any:
        def loss(*x: Any) -> Any:
            return (attention(*x, mask_type="arbitrary", mask=mask, soft_cap=2.0) * direction).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    got = gradients(q, k, v, mask_of("arbitrary"))
    assert all(jnp.isfinite(g).all() for g in got)
    assert (got[0][1, 2] == 0).all()
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    random = np.random.default_rng(1)
    for at, g in enumerate(got):
        along = random.standard_normal(g.shape)
        up, down = ([*wide[:at], wide[at] + step * along, *wide[at + 1 :]] for step in (1e-5, -1e-5))
        ends = [(expected(*x, HIDDEN["arbitrary"], cap=2.0) * np.asarray(direction)).sum() for x in (up, down)]
        assert np.isclose((np.asarray(g) * along).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-4), "qkv"[at]


def test_a_bias_of_minus_infinity_hides_as_a_mask_does() -> None:
    x, mask = tuple(map(jnp.asarray, operands())), mask_of("arbitrary")
    bias = jnp.where(mask, -jnp.inf, 0.0)

    def both(*x: Any) -> Any:
        return attention(*x, bias=bias), attention(*x, mask_type="arbitrary", mask=mask)

    one, other = both(*x)
    assert (one == other).all() and (one[1, 2] == 0).all()
    for g in jax.grad(lambda *x: both(*x)[0].sum(), argnums=(0, 1, 2))(*x):
        assert jnp.isfinite(g).all()


def test_dropout_drops_its_fraction_and_keeps_the_mean() -> None:
    q, k, v = map(jnp.asarray, operands())
    run = jax.jit(lambda key: attention(q, k, v, dropout=0.25, dropout_key=key))
    # Threefry takes seconds to compile.
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 300)
    mean = jax.jit(lambda keys: jax.lax.map(run, keys).mean(0))(keys)
    assert jnp.abs(mean - attention(q, k, v)).max() < 0.12
    one = jax.jit(lambda key: attention(q, k, jnp.ones_like(v), dropout=0.25, dropout_key=key))
    assert not (run(keys[0]) == run(keys[1])).all() and (run(keys[0]) == run(keys[0])).all()
    assert one(keys[0]).std() > 0.05


def test_bf16_stays_bf16_with_scores_in_float32() -> None:
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in operands())
    y = attention(q, k, v, mask_type="causal")
    assert y.dtype == jnp.bfloat16
    wide = [np.asarray(x.astype(jnp.float32)) for x in (q, k, v)]
    assert_close("bf16", y.astype(jnp.float32), expected(*wide, HIDDEN["causal"]), 5e-3)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"mask_type": "causl"}, "no mask type 'causl'; did you mean 'causal'"),
        ({"mask_type": "padding"}, "'padding' needs a mask, True where masked out"),
        ({"mask": jnp.zeros((SQ, SK), bool)}, "'none' takes no mask; give 'arbitrary'"),
        ({"mask_type": "arbitrary", "mask": jnp.zeros((SQ, SK))}, "a mask is boolean, True where masked out"),
        ({"mask_type": "arbitrary", "mask": jnp.zeros((SK, SQ), bool)}, r"mask has shape \(7, 5\), which does not"),
        ({"mask_type": "padding", "mask": jnp.zeros((B, SK), bool)}, r"of the queries has shape \(2, 7\), expected"),
        ({"mask_type": "causal", "window": (2, 1)}, r"window \(2, 1\) looks ahead"),
        ({"window": (2, -2)}, r"give \(left, right\)"),
        ({"dropout": 0.1}, "no dropout_key was passed"),
        ({"bias": jnp.zeros((3, SQ, SK))}, r"bias has shape \(3, 5, 7\), which does not broadcast"),
    ],
)
def test_invalid_arguments_give_a_clear_error(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attention(*map(jnp.asarray, operands()), **options)


def test_heads_that_do_not_divide_give_a_clear_error() -> None:
    q, k, v = map(jnp.asarray, operands(groups=3))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 heads"):
        attention(q, k, v)
