"""Test what a state cache stores, forgets, reorders and refuses."""

import copy

import pytest
import torch

from quaver.torch.nn.ssm.mamba2 import StateCache
from tests.close import assert_bitwise

TOKENS, STATE = torch.randn(2, 3, 5), torch.randn(2, 4, 6, 7)
X = torch.randn(2, 1, 8)


def filled(layers: int = 2) -> StateCache:
    cache = StateCache(layers)
    for layer in range(layers):
        assert cache.read(layer, X) == (None, None)
        cache.update(layer, TOKENS + layer, STATE + layer, 9)
    return cache


def test_written_state_is_read_back_at_the_same_address() -> None:
    cache = filled()
    assert (cache.layers, cache.batch, cache.length, cache.length_of(1)) == (2, 2, 9, 9)
    before = cache.read(0, X)
    assert_bitwise(before[0], TOKENS)
    cache.update(0, TOKENS * 2, STATE * 2, 1)
    assert (cache.length, cache.length_of(0)) == (9, 10)
    assert_bitwise(before[1], STATE * 2), "a captured step finds it at the same address"


def test_reset_reorder_and_truncate() -> None:
    cache = filled()
    cache.reorder(torch.tensor([1, 0, 1]))
    assert cache.batch == 3
    assert_bitwise(cache.read(1, X[[0, 0, 0]])[1], STATE[[1, 0, 1]] + 1)
    cache.truncate(9)
    with pytest.raises(ValueError, match=r"a state cannot be truncated to 5: keep a copy\.deepcopy"):
        cache.truncate(5)
    cache.truncate(0)
    assert cache.length == 0 and cache.read(0, X) == (None, None)
    cache.update(0, TOKENS[:1].double(), STATE[:1], 1)
    cache.reset()
    assert cache.length == 0


def test_a_copied_module_is_restored() -> None:
    cache = filled(1)
    before = copy.deepcopy(cache)
    cache.update(0, TOKENS * 2, STATE * 2, 1)
    assert_bitwise(before.read(0, X)[1], STATE)
    assert before.length == 9


def test_mismatched_inputs_give_a_clear_error_and_leave_the_cache_unchanged() -> None:
    with pytest.raises(ValueError, match="needs a positive number of layers"):
        StateCache(0)
    with pytest.raises(ValueError, match="the cache is empty"):
        StateCache(1).reorder(torch.tensor([0]))
    cache = filled()
    with pytest.raises(ValueError, match="layer 2 of a cache for 2"):
        cache.read(2, X)
    with pytest.raises(ValueError, match="holds 2 sequences, but got 3"):
        cache.read(0, X[[0, 0, 0]])
    with pytest.raises(ValueError, match=r"under torch\.no_grad"):
        cache.read(0, X.clone().requires_grad_())
    with pytest.raises(ValueError, match="not all rows"):
        cache.reorder(torch.tensor([2]))
    for tokens, state in ((TOKENS.double(), STATE), (TOKENS, STATE[:1])):
        with pytest.raises(ValueError, match="the cache holds"):
            cache.update(0, tokens, state, 1)
    assert_bitwise(cache.read(0, X)[0], TOKENS)
    cache.update(0, TOKENS, STATE, 1)
    with pytest.raises(ValueError, match="a forward failed"):
        cache.read(0, X)


def test_state_written_in_inference_mode_can_be_written_outside_later() -> None:
    cache = StateCache(1)
    with torch.inference_mode():
        cache.update(0, TOKENS.clone(), STATE.clone(), 1)
    cache.update(0, TOKENS, STATE, 1)
    assert cache.length == 2
