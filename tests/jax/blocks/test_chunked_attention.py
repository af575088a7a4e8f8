"""Attention over several chunks: equal to PyTorch in float64, forward and backward, and no array of all scores."""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params

import quaver
from quaver.jax.blocks.attention import attention
from quaver.jax.blocks.chunked_attention import ScoreOptions, chunk_pairs
from quaver.torch.nn.attention import attention as attention_torch
from tests.close import assert_bitwise, assert_close
from tests.xla_options import QUICKEST

#: Two chunks of queries and three of keys, neither of which divides into chunks of equal length.
B, SQ, SK, H, G, D, DV = 2, 301, 517, 4, 2, 8, 6
#: Bound of the gradients of float32.
BACKWARD = 2e-6
#: Of slopes, whose gradient sums scores times distances of either sign.
SLOPE = 5e-6


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operands(batch: int = B, queries: int = SQ, keys: int = SK, groups: int = G) -> list[np.ndarray]:
    return [normal(0, batch, queries, H, D), normal(1, batch, keys, groups, D), normal(2, batch, keys, groups, DV)]


PADDING = np.arange(SQ) >= np.array([[280], [301]]), np.arange(SK) >= np.array([[517], [130]])
ARBITRARY = np.random.default_rng(3).random((B, 1, SQ, SK)) < 0.5
ARBITRARY[1, :, 2] = True
BIAS = normal(4, 1, H, SQ, SK)
SLOPES = np.float32([0.5, 0.1, 0.02, 0.0])
SINKS = np.float32([-1.0, 0.0, 0.5, 2.0])
HIDING = np.where(np.random.default_rng(5).random((B, 1, 1, SK)) < 0.3, -np.inf, 0).astype(np.float32)

#: Options of a call; every pair of options that change the scores or the softmax occurs.
CASES: dict[str, dict[str, Any]] = {
    "none, bias, sinks, local chunks": {"bias": BIAS, "sinks": SINKS, "chunk": 100},
    "none, window, soft cap, slopes": {"window": (200, 70), "soft_cap": 2.0, "alibi_slopes": SLOPES},
    "causal, sinks, slopes": {"mask_type": "causal", "sinks": SINKS, "alibi_slopes": SLOPES},
    "causal, window, sinks, soft cap": {"mask_type": "causal", "window": (90, 0), "sinks": SINKS, "soft_cap": 2.0},
    "causal, local chunks, soft cap, bias": {"mask_type": "causal", "chunk": 64, "soft_cap": 2.0, "bias": BIAS},
    "bottom right, window, bias": {"mask_type": "causal_bottom_right", "window": (90, 0), "bias": BIAS[:, :1]},
    "bottom right, local chunks, slopes": {
        "mask_type": "causal_bottom_right", "chunk": 150, "alibi_slopes": SLOPES * np.ones((B, 1), np.float32),
    },
    "padding, bias over keys, slopes": {
        "mask_type": "padding", "mask": PADDING, "bias": BIAS[:, :, :1], "alibi_slopes": SLOPES
    },
    "padding causal, local chunks, sinks": {
        "mask_type": "padding_causal", "mask": PADDING, "chunk": 100, "sinks": SINKS
    },
    "padding bottom right, window, slopes": {
        "mask_type": "padding_causal_bottom_right", "mask": PADDING, "window": (60, 0), "alibi_slopes": SLOPES
    },
    "arbitrary, window, off by one": {
        "mask_type": "arbitrary", "mask": ARBITRARY, "window": (300, 20), "sinks": "off_by_one"
    },
    "arbitrary over keys, soft cap, scale": {
        "mask_type": "arbitrary", "mask": ARBITRARY[:, :, :1], "soft_cap": 1.5, "scale": 0.7
    },
}  # fmt: skip


def of_torch(value: Any) -> Any:
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(map(of_torch, value))
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value)
    return tensor.double().requires_grad_() if tensor.is_floating_point() else tensor


def compare(qkv: list[np.ndarray], options: dict[str, Any], theirs: dict[str, Any] | None = None) -> None:
    """Output and gradients of q, k, v and all floating-point options against PyTorch's in float64."""
    trained = {name: x for name, x in options.items() if isinstance(x, np.ndarray) and x.dtype == np.float32}
    fixed = {name: x for name, x in options.items() if name not in trained}
    wide = [of_torch(x) for x in qkv]
    of_options = {name: of_torch(x) for name, x in (options if theirs is None else theirs).items()}
    expected = attention_torch(*wide, **of_options)
    direction = normal(9, *expected.shape)
    arguments = [*wide, *(of_options[name] for name in trained)]
    expected_gradients = torch.autograd.grad(expected, arguments, torch.from_numpy(direction).double())

    @jax.jit
    def run(qkv: Any, trained: Any, direction: Any) -> Any:
        y, pull = jax.vjp(lambda qkv, trained: attention(*qkv, **fixed, **trained), qkv, trained)
        return y, pull(direction)

    y, (of_qkv, of_trained) = run(qkv, trained, direction)
    assert_close("output", y, expected.detach(), 1e-6)
    # jit sorts the keys of a dict.
    gradients = *of_qkv, *(of_trained[name] for name in trained)
    for name, a, b in zip(("q", "k", "v", *trained), gradients, expected_gradients, strict=True):
        assert_close(name, a, b, SLOPE if name == "alibi_slopes" else BACKWARD)


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_those_of_torch(case: str) -> None:
    compare(operands(groups=1 if "soft cap" in case else G), CASES[case])


def test_concatenated_sequences_see_only_their_own_keys() -> None:
    """With cumulative lengths, and with segment ids where queries and keys are the same tokens."""
    ends = np.array([0, 5, 5, 290, 301], np.int32), np.array([0, 260, 270, 500, 517], np.int32)
    qkv = operands(1)
    for mask_type in ("causal", "causal_bottom_right"):
        options: dict[str, Any] = {"mask_type": mask_type, "window": (200, 0), "alibi_slopes": SLOPES, "chunk": 90}
        compare_ragged(qkv, ends, ends, options)
    q, k, v = operands(1, SQ, SQ)
    ids = np.repeat([7, 2, 0], [5, 285, 11])[None]
    for ours in ({"cu_seqlens": ends[0]}, {"segment_ids": ids}, {"segment_ids": (ids, ids)}):
        compare_ragged([q, k, v], (ends[0], ends[0]), None, {"mask_type": "causal", "chunk": 90, **ours})


def compare_ragged(qkv: list[np.ndarray], ends: Any, own: Any, options: dict[str, Any]) -> None:
    theirs = {name: x for name, x in options.items() if name not in ("cu_seqlens", "segment_ids")}
    theirs = {name: of_torch(x) for name, x in theirs.items()}
    flat = [torch.from_numpy(x[0]).double().requires_grad_() for x in qkv]
    y = attention_torch(*flat, layout="thd", cu_seqlens=tuple(map(torch.from_numpy, ends)), **theirs)
    direction = normal(9, 1, *y.shape)
    expected = torch.autograd.grad(y, flat, torch.from_numpy(direction[0]).double())
    sequences = {} if own is None else {"cu_seqlens": own}

    @jax.jit
    def run(qkv: Any, direction: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attention(*x, **options, **sequences), *qkv)
        return out, pull(direction)

    out, gradients = run(qkv, direction)
    assert_close("output", out[0], y.detach(), 1e-6)
    for name, a, b in zip("qkv", gradients, expected, strict=True):
        assert_close(name, a[0], b, BACKWARD)


def largest(jaxpr: Any) -> int:
    """Elements of the largest array that a program makes, those of its loops included."""
    own = max((math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars), default=0)
    return max([own, *(largest(inner) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params))])


def loss(*x: Any, **options: Any) -> Any:
    return (attention(*x, **options).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize(
    "options",
    [
        {"mask_type": "causal"},
        {"mask_type": "causal", "window": (500, 0), "soft_cap": 3.0},
        {"dropout": 0.1},
        {"mask_type": "causal", "recipe": "tensorwise"},
    ],
    ids=["causal", "window", "dropout", "eight bits"],
)
def test_no_array_has_an_element_for_every_pair_of_tokens(options: dict[str, Any]) -> None:
    tokens = 4096
    if "recipe" in options:
        options = options | {"recipe": quaver.recipes.tensorwise(attention=True)}
    if "dropout" in options:
        options = options | {"dropout_key": jax.random.key(0, impl="unsafe_rbg")}
    x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    program = jax.make_jaxpr(jax.grad(partial(loss, **options), argnums=(0, 1, 2)))(x, x, x)
    assert largest(program.jaxpr) < tokens * tokens / 4


def test_chunks_that_nobody_sees_are_not_computed() -> None:
    def computed(**options: Any) -> int:
        return len(chunk_pairs(2048, 2048, ScoreOptions(1.0, **options), 0, (256, 256)).visible)

    assert computed() == 64 and computed(window=(-1, 0)) == 36 and computed(window=(256, 0)) == 8 + 7
    assert computed(window=(0, 0)) == 8 and computed(window=(257, 0)) == 8 + 7 + 6


def test_the_memory_of_a_step_does_not_grow_with_the_square_of_the_tokens() -> None:
    def temporary(tokens: int) -> int:
        x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
        step = jax.jit(jax.grad(partial(loss, mask_type="causal"), argnums=(0, 1, 2)), compiler_options=QUICKEST)
        return int(step.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes)

    assert temporary(8192) < 3 * temporary(4096)


# ---- values that hurt ----


def test_nan_in_padding_does_not_spread() -> None:
    qkv = operands()
    dirty = [x.copy() for x in qkv]
    for x, hidden in zip(dirty, (PADDING[0], PADDING[1], PADDING[1]), strict=True):
        x[hidden] = np.nan
    direction = normal(9, B, SQ, H, DV)
    direction[PADDING[0]] = np.nan

    @jax.jit
    def run(qkv: Any, direction: Any) -> Any:
        y, pull = jax.vjp(lambda *x: attention(*x, mask_type="padding_causal", mask=PADDING), *qkv)
        return y, *pull(direction)

    for got, expected in zip(run(dirty, direction), run(qkv, np.nan_to_num(direction)), strict=True):
        assert_bitwise(got, expected)


def test_a_nan_that_is_seen_reaches_only_the_queries_that_see_it() -> None:
    q, k, v = operands()
    q[0, 200] = np.nan
    k[1, 400] = np.inf
    y = np.asarray(attention(q, k, v, mask_type="padding", mask=PADDING))
    assert np.argwhere(np.isnan(y).any((2, 3))).tolist() == [[0, 200]]


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 1)])
def test_empty_sequences(queries: int, keys: int) -> None:
    qkv = operands(1, queries, keys)
    y, pull = jax.vjp(lambda *x: attention(*x, mask_type="causal", sinks=SINKS), *qkv)
    assert y.shape == (1, queries, H, DV) and jnp.isfinite(y).all()
    gradients = pull(jnp.ones_like(y))
    assert all(g.shape == x.shape and jnp.isfinite(g).all() for g, x in zip(gradients, qkv, strict=True))
    if not keys:
        assert not y.any()


def test_a_query_that_sees_no_key_gives_no_gradient_to_sinks_and_slopes() -> None:
    mask = jnp.ones((1, 1, 1, SK), bool)

    def run(sinks: Any, slopes: Any, *qkv: Any) -> Any:
        return loss(*qkv, mask_type="arbitrary", mask=mask, sinks=sinks, alibi_slopes=slopes)

    gradients = jax.jit(jax.grad(run, argnums=(0, 1, 2, 3, 4)))(SINKS, SLOPES, *operands(1))
    assert not any(g.any() for g in gradients)


# ---- dropout ----


def test_backward_drops_the_same_probabilities_as_forward() -> None:
    key, step = jax.random.key(0, impl="unsafe_rbg"), 1e-2
    q, k, v = operands(1)
    along = normal(7, *q.shape)

    @jax.jit
    def run(q: Any) -> Any:
        return jax.value_and_grad(loss)(q, k, v, dropout=0.5, dropout_key=key)

    slope = (run(q + step * along)[0] - run(q - step * along)[0]) / (2 * step)
    assert np.isclose((run(q)[1] * along).sum(), slope, rtol=1e-2)


def test_dropped_probabilities_are_independent_and_as_many_as_asked_for() -> None:
    """With one-hot values of one chunk each, outputs are the kept probabilities."""
    keys = 512
    q, k = np.zeros((1, 512, 1, 8), np.float32), np.zeros((1, keys, 1, 8), np.float32)
    kept = np.asarray(
        attention(q, k, np.eye(keys, dtype=np.float32)[None, :, None], dropout=0.25, dropout_key=jax.random.key(1))
    )[0, :, 0]
    assert np.isclose(np.unique(kept), [0, 1 / keys / 0.75]).all()
    kept = kept > 0
    assert abs(kept.mean() - 0.75) < 0.005
    assert np.abs(kept.mean(0) - 0.75).max() < 0.1 and np.abs(kept.mean(1) - 0.75).max() < 0.1
    # Chunks have different masks.
    quarters = [kept[i : i + 256, j : j + 256] for i in (0, 256) for j in (0, 256)]
    agree = [(a == b).mean() for a, b in itertools.combinations(quarters, 2)]
    assert np.abs(np.array(agree) - (0.75**2 + 0.25**2)).max() < 0.01


# ---- transformations ----


def test_vmap_remat_and_scan_give_the_same_gradients() -> None:
    qkv = [jnp.asarray(x) for x in operands(2, 300, 300)]
    options: dict[str, Any] = {"mask_type": "causal", "window": (200, 0), "sinks": jnp.asarray(SINKS)}
    plain = partial(loss, **options)

    def mapped(*x: Any) -> Any:
        return jax.vmap(lambda *x: plain(*(a[None] for a in x)))(*x).sum()

    def scanned(*x: Any) -> Any:
        return jax.lax.scan(lambda sum, x: (sum + plain(*(a[None] for a in x)), None), 0.0, x)[0]

    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(*qkv)
    for function in (mapped, scanned, jax.checkpoint(plain)):
        for got, right in zip(jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*qkv), expected, strict=True):
            assert_close(str(function), got, right, 1e-6)


def test_a_second_derivative_is_that_of_a_plain_formula() -> None:
    q, k, v = (jnp.asarray(x) for x in operands(1, 259, 259, H))
    small = [x[..., :1, :2] for x in (q, k, v)]

    def formula(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2)
        scores = jnp.where(jnp.tri(259, dtype=bool), scores, -jnp.inf)
        return (jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) ** 2).sum()

    def second(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (jax.grad(function)(*x) ** 2).sum(), argnums=(0, 1)))(*small)

    for got, expected in zip(second(partial(loss, mask_type="causal")), second(formula), strict=True):
        assert_close("second derivative", got, expected, 1e-5)


def test_gradients_export_with_symbolic_sizes() -> None:
    batch, tokens = jax.export.symbolic_shape("batch, tokens")
    step = jax.jit(jax.grad(partial(loss, mask_type="causal", window=(5, 0))), compiler_options=QUICKEST)
    q, k, v = operands(2, 300, 300, H)
    for shape in ((batch, 300), (batch, tokens)):
        x = [jax.ShapeDtypeStruct((*shape, *a.shape[2:]), jnp.float32) for a in (q, k, v)]
        assert_close(str(shape), jax.export.export(step)(*x).call(q, k, v), step(q, k, v), 2e-6)
