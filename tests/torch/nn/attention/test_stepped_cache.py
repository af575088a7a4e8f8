"""Test that steps begun from outside append the new part of each sequence, in any row order."""

import pytest
import torch

from quaver.torch.nn.attention.kv_cache import SteppedKVCache
from tests.close import assert_bitwise


def test_rows_follow_their_sequences_as_these_come_and_go() -> None:
    cache = SteppedKVCache(pages=12, page_size=4)
    tokens: dict[str, torch.Tensor] = {}
    held: dict[str, int] = {}
    for new in ({"a": 5, "b": 2}, {"b": 1, "a": 1}, {"c": 3, "b": 4}, {"a": 2, "c": 1}):
        # What was left out is over, and begins anew with other tokens.
        tokens = {s: tokens[s] if s in held else torch.randn(2, 12, 2, 4) for s in new}
        held = {s: held.get(s, 0) for s in new}
        cache.pre_step(new)
        assert cache.lengths().tolist() == [held[s] for s in new]
        longest = max(new.values())
        rows = torch.full((2, len(new), longest, 2, 4), torch.nan)
        for row, (s, n) in enumerate(new.items()):
            rows[:, row, :n] = tokens[s][:, held[s] : held[s] + n]
        for layer in range(2):
            k, v, *_ = cache.join(layer, *rows, "padding_causal")
            for row, (s, n) in enumerate(new.items()):
                end = held[s] + n
                assert_bitwise(k[row, :end], tokens[s][0, :end], f"keys of {s} in layer {layer}")
                assert_bitwise(v[row, :end], tokens[s][1, :end], f"values of {s} in layer {layer}")
        held = {s: held[s] + n for s, n in new.items()}


def test_rows_without_a_step_are_refused() -> None:
    cache = SteppedKVCache(pages=4, page_size=4)
    k = torch.randn(2, 1, 2, 4)
    with pytest.raises(ValueError, match=r"2 rows, and the step has 0: call pre_step"):
        cache.join(0, k, k, "padding_causal")
    cache.pre_step({"a": 1})
    with pytest.raises(ValueError, match="2 rows, and the step has 1"):
        cache.join(0, k, k, "padding_causal")
