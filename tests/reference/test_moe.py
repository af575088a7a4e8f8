"""The specification of experts on examples small enough to be read."""

import numpy as np
import pytest

from quaver.reference import moe
from tests.close import assert_bitwise


def test_a_token_is_routed_to_its_best_experts_with_softmax_weights() -> None:
    routing = moe.route(np.log(np.array([[1.0, 4.0, 2.0, 3.0]])), 2)
    assert routing.indices.tolist() == [[1, 3]]
    np.testing.assert_allclose(routing.weights, [[4 / 7, 3 / 7]])
    np.testing.assert_allclose(routing.probabilities, [[0.1, 0.4, 0.2, 0.3]])


def test_a_softmax_over_all_experts_is_not_renormalized() -> None:
    logits = np.log(np.array([[1.0, 4.0, 2.0, 3.0]]))
    np.testing.assert_allclose(moe.route(logits, 2, softmax_first=True).weights, [[0.4, 0.3]])
    normalized = moe.route(logits, 2, softmax_first=True, normalize=True, scale=7.0).weights
    np.testing.assert_allclose(normalized, [[4.0, 3.0]])


def test_sigmoids_and_roots_of_softplus_are_shares_of_their_sum() -> None:
    odds = np.array([[1.0, 3.0, 1 / 3]])
    routing = moe.route(np.log(odds), 2, scores="sigmoid")
    np.testing.assert_allclose(routing.weights, [[0.75 / 1.25, 0.5 / 1.25]])
    np.testing.assert_allclose(moe.route(np.log(odds), 1, scores="sigmoid").weights, [[0.75]])
    roots = moe.route(np.log(np.expm1(np.array([[4.0, 1.0]]))), 2, scores="sqrtsoftplus")
    np.testing.assert_allclose(roots.weights, [[2 / 3, 1 / 3]])


def test_a_bias_chooses_and_does_not_weigh() -> None:
    routing = moe.route(np.zeros((1, 3)), 2, scores="sigmoid", bias=np.array([0.0, -1.0, 0.5]))
    assert routing.indices.tolist() == [[2, 0]]
    np.testing.assert_allclose(routing.weights, [[0.5, 0.5]])


def test_experts_of_the_best_groups_alone_are_chosen() -> None:
    logits = np.array([[5.0, -5.0, -5.0, 2.0, 2.0, 1.9, 0.0, 0.0, 4.0]])
    by_best = moe.route(logits, 2, groups=3, top_groups=1, best_of_group=1)
    assert by_best.indices.tolist() == [[0, 1]]
    by_two = moe.route(logits, 2, groups=3, top_groups=1)
    # Sums of two: 0, 4 and 4; the first 4 wins.
    assert by_two.indices.tolist() == [[3, 4]]


@pytest.mark.parametrize("first, second", [(0.0, -0.0), (-0.0, 0.0), (np.nan, np.nan), (np.inf, np.inf)])
def test_equal_values_keep_their_order(first: float, second: float) -> None:
    assert moe.descending(np.array([-np.inf, first, second])) == [1, 2, 0]
    assert moe.descending(np.array([np.inf, np.nan])) == [1, 0]


def test_rows_are_ordered_by_expert_and_then_by_token() -> None:
    indices = np.array([[2, 0], [0, 2], [2, 3]])
    row, ends, count = moe.places(indices, 4)
    assert (row.tolist(), ends.tolist(), count) == ([2, 0, 1, 3, 4, 5], [2, 2, 5, 6], 6)
    row, ends, count = moe.places(indices, 4, pad=4)
    assert (row.tolist(), ends.tolist(), count) == ([4, 0, 1, 5, 6, 8], [4, 4, 8, 12], 16)


def test_a_capacity_takes_the_first() -> None:
    row, ends, count = moe.places(np.array([[2, 0], [0, 2], [2, 3]]), 4, capacity=1)
    assert (row.tolist(), ends.tolist(), count) == ([1, 0, -1, -1, -1, 2], [1, 1, 2, 3], 4)


def test_a_number_of_no_expert_here_has_no_row() -> None:
    assert moe.places(np.array([[1, 4], [-1, 0]]), 2)[0].tolist() == [1, -1, -1, 0]


def test_expert_rows_are_summed_with_their_weights() -> None:
    x = np.array([[1.0, 2.0], [3.0, -0.0]], np.float32)
    y, _, row = moe.permute(x, np.array([[1, 0], [1, 2]]), 3, pad=2)
    assert y.tolist() == [[1, 2], [0, 0], [1, 2], [3, 0], [3, 0], [0, 0]]
    assert_bitwise(moe.unpermute(y, row, 2, np.array([[1.0, 2.0], [0.5, 0.5]])), np.float32([[3, 6], [3, -0.0]]))


@pytest.mark.parametrize("pad", [1, 2, 16, 128])
@pytest.mark.parametrize("capacity", [None, 1, 3])
def test_there_are_rows_enough_however_choices_fall(pad: int, capacity: int | None) -> None:
    rng = np.random.default_rng(pad)
    for experts_, tokens, k in ((1, 4, 1), (3, 5, 2), (8, 2, 2), (8, 40, 3), (2, 0, 1)):
        worst = np.minimum(np.arange(tokens * k).reshape(tokens, k), experts_ - 1)
        for indices in (rng.integers(0, experts_, (tokens, k)), np.zeros((tokens, k), int), worst):
            row, ends, count = moe.places(indices, experts_, pad, capacity)
            assert ends[-1] <= count and row.max(initial=-1) < count and count % pad == 0
