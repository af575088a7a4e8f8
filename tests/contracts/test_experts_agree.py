"""Test that tokens are routed, ordered and summed with the same bits in both frameworks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver.reference.moe import why_not_rows
from tests.close import assert_bitwise, assert_close
from tests.operands import SPECS

OPTIONS: list[dict[str, Any]] = [
    {},
    {"softmax_first": True},
    {"softmax_first": True, "normalize": True},
    {"scores": "sigmoid"},
    {"scores": "sqrtsoftplus", "scale": 2.5},
    {"scores": "sigmoid", "groups": 4, "top_groups": 2, "biased": True},
    {"groups": 4, "top_groups": 2, "best_of_group": 2},
]
HARD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, 1.0, 1.0], np.float32)


def logits(tokens: int = 40, experts: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(tokens, experts)).astype(np.float32)


def given(options: dict[str, Any], of: Any) -> dict[str, Any]:
    """Options with a bias as an array of the framework, if any."""
    bias = np.linspace(-0.1, 0.1, 16).astype(np.float32)
    others = {name: value for name, value in options.items() if name != "biased"}
    return others | ({"bias": of(bias)} if "biased" in options else {})


def test_routes_agree() -> None:
    routes = jax.jit(lambda z: [qj.route(z, 3, **given(options, jnp.asarray)) for options in OPTIONS])
    for offset in (0, -60):
        z = logits() + np.float32(offset)
        for options, b in zip(OPTIONS, routes(z), strict=True):
            a = qt.route(torch.from_numpy(z), 3, **given(options, torch.from_numpy))
            assert np.asarray(b.indices).tolist() == a.indices.tolist(), (offset, options)
            for name, x, y in zip(a._fields[1:], a[1:], b[1:], strict=True):
                assert_close(f"{name} {offset} {options}", np.asarray(y), x, 1e-6)


def test_numbers_that_are_hard_to_order_choose_the_same_experts() -> None:
    z = HARD[np.random.default_rng(0).integers(len(HARD), size=(300, 12))]
    for k in (5, 12):
        ours = np.asarray(qj.route(jnp.asarray(z), k, scores="sigmoid", normalize=False).indices)
        assert ours.tolist() == qt.route(torch.from_numpy(z), k, scores="sigmoid", normalize=False).indices.tolist()


def test_gradients_of_routes_agree() -> None:
    z, g = logits(), np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)

    def loss(z: Any, options: Any) -> Any:
        routing = qj.route(z, 3, **options)
        return (routing.weights * g).sum() + (routing.probabilities[:, 2:5] * g).sum()

    differentiable = OPTIONS[1:5]
    ours = jax.jit(lambda z: [jax.grad(loss)(z, options) for options in differentiable])(z)
    for options, jax_gradient in zip(differentiable, ours, strict=True):
        x = torch.from_numpy(z).requires_grad_()
        routing = qt.route(x, 3, **options)
        both = [routing.weights, routing.probabilities[:, 2:5]]
        (torch_gradient,) = torch.autograd.grad(both, x, [torch.from_numpy(g)] * 2)
        assert_close(f"gradient {options}", np.asarray(jax_gradient), torch_gradient, 1e-6)


CASES = list(itertools.product((33, 0), (4, 16), (3, 1), (16, 1), (2, None)))


@pytest.mark.usefixtures("hardly_optimized")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rows_places_sums_and_their_gradients_have_the_same_bits(dtype: Any) -> None:
    kind = torch.float32 if dtype is np.float32 else torch.bfloat16
    quick = [CASES[at] for at in ((0, 9, 17) if dtype is np.float32 else (6,))]
    for tokens, experts, k, pad, capacity in quick:
        rng = np.random.default_rng(experts + k)
        indices = rng.random((tokens, experts)).argsort(1)[:, :k]
        x, weights, g = (rng.normal(size=s).astype(np.float32) for s in ((tokens, 24), (tokens, k), (tokens, 24)))

        def through(
            x: Any, w: Any, indices: Any, k: int = k, experts: int = experts, more: Any = (pad, capacity)
        ) -> Any:
            rows, sizes, places = qj.permute(x, indices, experts, pad=more[0], capacity=more[1])
            return qj.unpermute(rows, places, k, w), (rows, sizes, places)

        y, back, (rows, sizes, places) = jax.vjp(
            lambda x, w, indices=indices: through(x, w, indices), x.astype(dtype), weights, has_aux=True
        )
        x_gradient, weights_gradient = back(g.astype(dtype))
        t, w = torch.from_numpy(x).to(kind).requires_grad_(), torch.from_numpy(weights).requires_grad_()
        theirs = qt.permute(t, torch.from_numpy(indices), experts, pad=pad, capacity=capacity)
        z = qt.unpermute(theirs.rows, theirs.places, k, w)
        t_gradient, w_gradient = torch.autograd.grad(z, (t, w), torch.from_numpy(g).to(kind))
        for ours, other in ((rows, theirs.rows), (y, z), (x_gradient, t_gradient)):
            assert_bitwise(np.asarray(ours).astype(np.float32), other.float())
        assert np.asarray(places).tolist() == theirs.places.tolist()
        assert np.asarray(sizes).cumsum().tolist() == theirs.offsets.tolist()
        assert_close("weights", np.asarray(weights_gradient), w_gradient, 1e-6)


def test_sums_have_the_same_bits_in_a_program() -> None:
    rng = np.random.default_rng(0)
    indices = rng.random((65, 8)).argsort(1)[:, :4]
    x, weights = rng.normal(size=(65, 96)).astype(np.float32), rng.random((65, 4)).astype(np.float32)

    def through(x: Any, w: Any) -> Any:
        rows, _, places = qj.permute(x, indices, 8, pad=16)
        return qj.unpermute(rows * 3, places, 4, w)

    rows, _, places = qt.permute(torch.from_numpy(x), torch.from_numpy(indices), 8, pad=16)
    expected = qt.unpermute(rows * 3, places, 4, torch.from_numpy(weights))
    assert_bitwise(np.asarray(jax.jit(through)(x, weights)), expected)


#: Stored parts by the first spec of each kind that is permuted.
MOVED = {(s.block, s.scale, s.format.packed, s.hadamard): n for n, s in reversed(SPECS.items()) if not why_not_rows(s)}


@pytest.mark.usefixtures("hardly_optimized")
@pytest.mark.parametrize("name", MOVED.values())
def test_codes_that_move_have_the_same_bits(name: str) -> None:
    spec, rng = SPECS[name], np.random.default_rng(0)
    x, indices = rng.normal(size=(33, 64)).astype(np.float32), rng.random((33, 6)).argsort(1)[:, :2]
    x[3, 5] = np.nan if spec.block[0] is not None else 100.0
    theirs = qt.permute(qt.quantize(torch.from_numpy(x), spec), torch.from_numpy(indices), 6, pad=16)
    ours = qj.permute(qj.quantize(x, spec), indices, 6, pad=16)
    assert_bitwise(np.asarray(ours.rows.codes()), theirs.rows.codes())
    assert_bitwise(np.asarray(ours.rows.scales()), theirs.rows.scales())
    assert np.asarray(ours.places).tolist() == theirs.places.tolist()


def test_the_same_is_refused() -> None:
    z, x = logits(3, 8), np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="k is 9, and there are 8 experts"):
        qj.route(z, 9)
    with pytest.raises(ValueError, match="3 groups do not divide 8 experts"):
        qj.route(z, 2, groups=3, top_groups=1)
    with pytest.raises(ValueError, match="a capacity of 0 drops every token"):
        qj.permute(x, np.zeros((3, 2), np.int32), 8, capacity=0)
    with pytest.raises(ValueError, match="of the same tokens"):
        qj.permute(x, np.zeros((4, 2), np.int32), 8)
    with pytest.raises(ValueError, match="weights are one for each of 3 tokens"):
        qj.unpermute(x, np.zeros(6, np.int32), 2, np.zeros((3, 3), np.float32))
    with pytest.raises(TypeError, match="logits is a list"):
        qj.route([[1.0]], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounds stochastically"):
        qj.permute(qj.quantize(x, SPECS["nvfp4.dgrad.a"]), np.zeros((3, 2), np.int32), 8)
