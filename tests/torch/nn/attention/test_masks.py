"""Masks, chunks and packed sequences hide what a loop over pairs hides, and masks that do not fit are refused."""

import itertools
from typing import Any

import pytest
import torch

import quaver.torch as qt
from quaver.reference.attention import MASKS
from quaver.torch.nn.attention import attention
from tests.close import assert_close
from tests.torch.nn.attention.cases import DV, LENGTHS, MASK_TYPES, B, D, H, expected, hides, mask_of, operands


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_chunks_hide_other_chunks(mask_type: str) -> None:
    assert set(MASK_TYPES) == set(MASKS)
    for (queries, keys), window, chunk in itertools.product(LENGTHS, [None, (1, -1)], [1, 3, 9]):
        given = mask_of(mask_type, queries, keys)
        left = tuple(m.flip(-1) for m in given) if isinstance(given, tuple) else given
        q, k, v = operands(queries, keys)
        for mask in (given, left):
            y = attention(q, k, v, mask_type=mask_type, mask=mask, window=window, chunk=chunk)
            hidden = hides(mask_type, window, queries, keys, mask, chunk)
            assert_close(f"{queries}, {keys}, {window}, {chunk}", y, expected(q, k, v, hidden), 1e-6)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_alibi_falls_with_the_distance_as_the_mask_type_aligns(name: str) -> None:
    q, k, v = operands(5, 7)
    slopes = torch.tensor([0.5, 0.25, 0.125, 3.0])
    for mask_type, shift in (("causal", 0), ("causal_bottom_right", 2)):
        distance = (torch.arange(7) - torch.arange(5)[:, None] - shift).abs()
        with qt.only(name):
            y = attention(q, k, v, mask_type=mask_type, alibi_slopes=slopes)
        bias = (-slopes[:, None, None] * distance).numpy()
        assert_close(mask_type, y, expected(q, k, v, hides(mask_type, None, 5, 7, None), bias=bias), 1e-6)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_chunk_is_a_number_of_positions(chunk: Any) -> None:
    with pytest.raises(ValueError, match="give a number of positions above 0"):
        attention(*operands(5, 7), chunk=chunk)


TOKENS = torch.zeros(B, 5, dtype=torch.bool)
PAIRS = torch.zeros(B, 1, 5, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    "mask_type, mask, window, message",
    [
        ("casual", None, None, "no mask type 'casual'; did you mean 'causal'"),
        ("padding", None, None, "needs a mask, True where masked out"),
        ("causal", PAIRS, None, "'causal' takes no mask; give 'arbitrary'"),
        ("arbitrary", PAIRS.float(), None, "the mask is torch.float32; a mask is a boolean tensor.*as `bias`"),
        ("arbitrary", PAIRS.long(), None, "the mask is torch.int64; a mask is a boolean tensor"),
        ("arbitrary", (TOKENS, TOKENS), None, "an arbitrary mask is one tensor"),
        ("arbitrary", PAIRS.mT, None, r"the mask has shape \[2, 1, 7, 5\].*\[2, 4, 5, 7\]: queries by keys"),
        ("padding", TOKENS, None, r"of the keys has shape \[2, 5\], expected \[batch, keys\] = \[2, 7\]"),
        ("padding_causal", (PAIRS, TOKENS), None, "of the queries has shape"),
        ("padding", (TOKENS,) * 3, None, "the padding mask is 3 masks; give .mask of queries, mask of keys."),
        ("padding", (None, TOKENS), None, "the mask is a NoneType; a mask is a boolean tensor"),
        ("causal", None, (1, 2, 3), "give .left, right., numbers of keys"),
        ("causal", None, (-2, 0), "numbers of keys, -1 for no bound"),
        ("causal", None, (1.5, 0), "numbers of keys, -1 for no bound"),
        ("causal", None, (3, 1), r"looks ahead, and 'causal' hides what is ahead; give \(3, 0\)"),
        ("padding_causal_bottom_right", TOKENS, (3, 1), "looks ahead"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask_type: str, mask: Any, window: Any, message: str) -> None:
    shapes = (B, 5, H, D), (B, 7, H, D), (B, 7, H, DV)
    with pytest.raises(ValueError, match=message):
        attention(*map(torch.zeros, shapes), mask_type=mask_type, mask=mask, window=window)
