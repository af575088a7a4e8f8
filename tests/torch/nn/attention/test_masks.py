"""Masks by name hide what a loop over pairs hides, and bad ones are refused with a sentence."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from quaver.reference.attention import MASKS
from quaver.torch.nn.attention.inputs import (
    RaggedLayout,
    ahead_of_query,
    alibi,
    check_chunk,
    check_mask,
    hidden,
    outside_of,
    runs_of_keys,
    simplify,
)
from tests.torch.nn.attention.cases import LENGTHS, MASK_TYPES, B, H, cases, hides, mask_of


def test_the_table_of_cases_has_every_mask_type() -> None:
    assert set(MASK_TYPES) == set(MASKS)


@pytest.mark.parametrize("mask_type, window, queries, keys", cases())
def test_every_mask_hides_the_named_positions(mask_type: str, window: Any, queries: int, keys: int) -> None:
    mask = mask_of(mask_type, queries, keys)
    masked = hidden(mask_type, mask, window, (B, H, queries, keys))
    masked = torch.zeros(1, dtype=torch.bool) if masked is None else masked
    masked = masked.expand(B, masked.shape[1] if masked.dim() == 4 else 1, queries, keys)
    np.testing.assert_array_equal(masked[:, 0].numpy(), hides(mask_type, window, queries, keys, mask))


@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_chunks_hide_other_chunks(mask_type: str) -> None:
    for (queries, keys), window, chunk in itertools.product(LENGTHS, [None, (1, -1)], [1, 3, 9]):
        given = mask_of(mask_type, queries, keys)
        left = tuple(m.flip(-1) for m in given) if isinstance(given, tuple) else given
        for mask in (given, left):
            masked = hidden(mask_type, mask, window, (B, H, queries, keys), chunk=chunk)
            assert masked is not None
            right = hides(mask_type, window, queries, keys, mask, chunk)
            np.testing.assert_array_equal(masked.expand(B, 1, queries, keys)[:, 0].numpy(), right)
        if mask is None:
            runs = runs_of_keys(mask_type, window, queries, keys, chunk=chunk)
            assert runs is not None
            np.testing.assert_array_equal(outside_of(runs, keys).expand(B, 1, queries, keys)[:, 0].numpy(), right)


def test_chunks_restart_with_each_packed_sequence() -> None:
    ends = torch.tensor([0, 5, 5, 12])
    ragged = RaggedLayout(ends, ends, None)
    masked = hidden("causal", None, None, (1, H, 12, 12), ragged=ragged, chunk=3)
    runs = runs_of_keys("causal", None, 12, 12, ragged=ragged, chunk=3)
    whole = np.ones((12, 12), bool)
    for i, j in ((0, 5), (5, 12)):
        whole[i:j, i:j] = hides("causal", None, j - i, j - i, None, 3)[0]
    assert masked is not None and runs is not None
    np.testing.assert_array_equal(masked[0, 0].numpy(), whole)
    np.testing.assert_array_equal(outside_of(runs, 12)[0, 0].numpy(), whole)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_chunk_is_a_number_of_positions(chunk: Any) -> None:
    with pytest.raises(ValueError, match="give a number of positions above 0"):
        check_chunk(chunk)


@pytest.mark.parametrize("mask_type", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 7), (7, 5), (1, 7), (7, 1), (1, 1)])
def test_a_simplified_mask_hides_the_same(mask_type: str, queries: int, keys: int) -> None:
    for left in range(-1, 9):
        for right in range(-1, 9) if mask_type == "none" else (-1, 0):
            plain = simplify(mask_type, (left, right), queries, keys)
            was = hides(mask_type, (left, right), queries, keys, None)
            np.testing.assert_array_equal(hides(*plain, queries, keys, None), was, str((left, right, plain)))


@pytest.mark.parametrize(
    "given, plain",
    [
        (("causal_bottom_right", None, 7, 7), ("causal", None)),
        (("causal_bottom_right", None, 1, 9), ("none", None)),
        (("causal", (4096, -1), 512, 512), ("causal", None)),
        (("causal", (4096, 0), 512, 512), ("causal", None)),
        (("none", (6, 6), 7, 7), ("none", None)),
        (("none", (5, 6), 7, 7), ("none", (5, -1))),
        (("causal_bottom_right", (4, 0), 1, 9), ("causal_bottom_right", (4, -1))),
    ],
)
def test_redundant_masks_are_dropped(given: Any, plain: Any) -> None:
    assert simplify(*given) == plain


@pytest.mark.parametrize("bottom_right", [False, True])
def test_packed_sequences_do_not_attend_to_each_other(bottom_right: bool) -> None:
    of_queries, of_keys = [2, 0, 3, 1], [3, 2, 2, 1]
    ends = [torch.tensor([0, *n]).cumsum(0) for n in (of_queries, of_keys)]
    ragged = RaggedLayout(*ends, None)
    mask_type = "causal_bottom_right" if bottom_right else "causal"
    shape = (1, H, sum(of_queries), sum(of_keys))
    masked = hidden(mask_type, None, (1, -1), shape, ragged=ragged)
    whole = np.ones(shape[2:], bool)
    for n, (queries, keys) in enumerate(zip(of_queries, of_keys, strict=True)):
        block = hides(mask_type, (1, -1), queries, keys, None)[0]
        i, j = int(ends[0][n]), int(ends[1][n])
        whole[i : i + queries, j : j + keys] = block
    assert masked is not None
    np.testing.assert_array_equal(masked[0, 0].numpy(), whole)


def test_alibi_falls_with_the_distance_as_the_mask_type_aligns() -> None:
    slopes = torch.tensor([1.0, 0.5])
    top_left = alibi(slopes, ahead_of_query("causal", None, (1, 2, 2, 3)))
    assert top_left[0].tolist() == [[[0, -1, -2], [-1, 0, -1]], [[0, -0.5, -1], [-0.5, 0, -0.5]]]
    bottom_right = alibi(slopes, ahead_of_query("causal_bottom_right", None, (1, 2, 2, 3)))
    assert bottom_right[0, 0].tolist() == [[-1, 0, -1], [-2, -1, 0]]


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
    with pytest.raises(ValueError, match=message):
        check_mask(mask_type, mask, window, (B, H, 5, 7), False)


def test_ragged_tokens_take_no_padding() -> None:
    with pytest.raises(ValueError, match=r"concatenated sequences have no padding.*give 'causal'"):
        check_mask("padding_causal", TOKENS, None, (1, H, 5, 7), True)
