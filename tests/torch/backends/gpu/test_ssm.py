"""Test chunks of sequences as read by kernels: each token once, and none of another sequence."""

from itertools import pairwise

import pytest
import torch

from quaver.torch.backends.gpu.ssm import FEWEST, chunks_of


@pytest.mark.parametrize(
    "ends",
    [[0, 5], [0, 0, 0], [0, 0, 16, 16, 33], [0, 1, 2, 3], [0, 64, 128], [0, 70, 70]],
    ids=["one", "no tokens", "empty ones", "short ones", "whole chunks", "an empty last one"],
)
def test_each_token_is_in_one_chunk_of_its_own_sequence(ends: list[int]) -> None:
    chunks = chunks_of(torch.empty(1, ends[-1], 3), torch.tensor(ends), FEWEST)
    assert chunks.table is not None and chunks.ranges is not None
    seen: list[int] = []
    for sequence, (start, end) in enumerate(pairwise(ends)):
        for number in range(int(chunks.ranges[sequence]), int(chunks.ranges[sequence + 1])):
            first, rest, before, own = chunks.table[number].tolist()
            assert own == sequence and first == start + before and first + rest == end and rest > 0
            seen += range(first, first + min(rest, chunks.size))
    assert seen == list(range(ends[-1]))
    # As many as there can be: those beyond have no tokens.
    assert chunks.total == len(chunks.table) and not chunks.table[int(chunks.ranges[-1]) :, 1].any()


@pytest.mark.parametrize(("requested", "size"), [(0, 64), (1, 16), (40, 32), (300, 64)])
def test_chunks_are_powers_of_two_that_products_take(requested: int, size: int) -> None:
    assert chunks_of(torch.empty(2, 100, 3), None, requested)[:5] == (
        size,
        2 * -(-100 // size),
        2,
        -(-100 // size),
        100,
    )
