"""Chunks of sequences: each token has one place, and no chunk has tokens of two sequences."""

import pytest
import torch

from quaver.torch.nn.ssm.chunked_scan import chunks_of
from tests.close import assert_bitwise

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[8, 8], [5], [3, 0, 9, 4], [0, 0], [], [1] * 5])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_split_sequences_are_joined_back(lengths: list[int], size: int) -> None:
    x = torch.randn(sum(lengths), 3)
    chunks = chunks_of(lengths, size, CPU)
    total = len(chunks.sequences)
    assert total == sum(-(-n // size) for n in lengths)
    out, at = torch.full_like(x, torch.nan), 0
    for first in range(0, total, 2):
        last = min(first + 2, total)
        taken = chunks.taken(x, first, last, torch.float64)
        assert taken.shape == (last - first, size, 3) and taken.dtype is torch.float64
        chunks.put(out, taken, first, last)
    assert_bitwise(out, x)
    for sequence, length in enumerate(lengths):
        own = -(-length // size)
        if own:
            assert chunks.sequences[at : at + own] == [sequence] * own
            whole = chunks.taken(x, at, at + own, x.dtype).flatten(0, 1)
            start = sum(lengths[:sequence])
            assert_bitwise(whole[:length], x[start : start + length])
            assert not whole[length:].any(), "places to spare are zero"
        at += own


def test_spare_rows_are_zero_for_any_first_token() -> None:
    x = torch.full((3, 2), torch.nan)
    assert not chunks_of([3], 4, CPU).taken(x, 0, 1, x.dtype)[0, 3].any()
