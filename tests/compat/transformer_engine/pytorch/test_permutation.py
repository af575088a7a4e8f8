"""Rows go to experts and come back as Transformer Engine documents it."""

import pytest
import torch

import quaver.compat.transformer_engine.pytorch as te
from tests.close import assert_bitwise, assert_close

T, E, K, H = 9, 4, 2, 5


def chosen() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    indices = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    mask = torch.zeros(T, E, dtype=torch.bool).scatter(1, indices, True)
    return torch.randn(T, H, requires_grad=True), indices, mask


def test_a_mask() -> None:
    x, _, mask = chosen()
    rows, where = te.moe_permute(x, mask, num_out_tokens=T * K)
    expected = torch.cat([x[mask[:, e]] for e in range(E)])
    assert_bitwise(rows, expected)
    probs = torch.rand(T, E, requires_grad=True)
    back = te.moe_unpermute(rows, where, probs, restore_shape=x.shape)
    right = x * (probs * mask).sum(1, keepdim=True)
    assert_close("sums", back, right, 1e-6)
    g = torch.randn_like(back)
    for one, other in zip(
        torch.autograd.grad(back, (x, probs), g), torch.autograd.grad(right, (x, probs), g), strict=True
    ):
        assert_close("gradient", one, other, 1e-5)
    assert_close("plain", te.moe_unpermute(*te.moe_permute(x, mask), restore_shape=x.shape), x * K, 1e-6)


def test_indices() -> None:
    x, indices, _ = chosen()
    rows, where = te.moe_permute(x, indices, map_type="index")
    expected = torch.cat([x[(indices == e).nonzero()[:, 0]] for e in range(E)])
    assert_bitwise(rows, expected)
    probs = torch.rand(T, K)
    back = te.moe_unpermute(rows, where, probs, map_type="index")
    assert_close("sums", back, x * probs.sum(1, keepdim=True), 1e-6)
    some, _ = te.moe_permute(x, indices, num_out_tokens=7, map_type="index")
    assert_bitwise(some, expected[:7])


def test_probabilities_and_padding() -> None:
    x, _, mask = chosen()
    probs = torch.rand(T, E)
    rows, row_probs, where = te.moe_permute_with_probs(x, probs, mask)
    assert_bitwise(row_probs, torch.cat([probs[mask[:, e], e] for e in range(E)]))
    counts = mask.sum(0)
    padded, wide, where, moved, target = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 8)
    assert (target % 8 == 0).all() and padded.shape[0] == int(target.sum()) == wide.shape[0]
    begins, start = target.cumsum(0) - target, 0
    for e in range(E):
        n = int(counts[e])
        assert_bitwise(padded[begins[e] : begins[e] + n], rows[start : start + n])
        assert not padded[begins[e] + n : begins[e] + target[e]].any()
        start += n
    back = te.moe_unpermute(padded, where, restore_shape=x.shape, pad_offsets=moved)
    assert_close("sums", back, x * K, 1e-6)


def test_chunks_are_sorted() -> None:
    x, probs = torch.arange(6.0)[:, None], torch.arange(6.0)
    sizes, order = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    assert te.moe_sort_chunks_by_index(x, sizes, order).flatten().tolist() == [3, 4, 5, 0, 1, 2]
    rows, row_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert_bitwise(rows.flatten(), row_probs)


def test_invalid_arguments_give_a_clear_error() -> None:
    x, _, mask = chosen()
    with pytest.raises(ValueError, match="did you mean 'mask'"):
        te.moe_permute(x, mask, map_type="masks")
    with pytest.raises(ValueError, match="needs restore_shape"):
        te.moe_unpermute(*te.moe_permute(x, mask))
