"""Test tokens sorted by expert and combined again: the reference, gradients, codes moved as bytes."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.reference import moe as reference
from quaver.reference.moe import why_not_rows
from quaver.torch.nn.moe.permutation import order
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise
from tests.operands import SPECS, nasty

CASES = list(itertools.product((0, 1, 33), (4, 16), (1, 2, 4), (1, 16, 32), (None, 1, 5)))


def drawn(tokens: int, experts: int, k: int, seed: int = 0) -> Tensor:
    """Choices of k different experts, of which the last gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, max(experts - 1, k), generator=generator).topk(k, -1)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_offsets_places_and_sums_are_the_references(dtype: torch.dtype) -> None:
    for seed, (tokens, experts, k, pad, capacity) in enumerate(CASES):
        indices = drawn(tokens, experts, k, seed)
        x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
        rows, offsets, places = qt.permute(x, indices, experts, pad=pad, capacity=capacity)
        wide = x.float() if dtype is torch.bfloat16 else x
        y, ends, row = reference.permute(wide.numpy(), indices.numpy(), experts, pad, capacity)
        assert_bitwise(rows, y)
        assert_bitwise(offsets, ends)
        assert_bitwise(places, row)
        sources = order(indices, experts, pad, capacity)[2]
        assert rows.dtype is dtype and sources.shape[0] == rows.shape[0]
        weights = torch.rand(tokens, k, generator=torch.Generator().manual_seed(seed))
        for w in (None, weights):
            expected = reference.unpermute(y, row, k, None if w is None else w.numpy())
            ours = qt.unpermute(rows, places, k, w)
            assert_bitwise(ours, torch.from_numpy(expected).to(dtype) if dtype is torch.bfloat16 else expected)


def test_the_number_of_rows_does_not_depend_on_the_routing() -> None:
    for pad, capacity in ((1, None), (16, None), (16, 3)):
        shapes = set()
        for indices in (drawn(40, 8, 2), torch.zeros(40, 2, dtype=torch.int64), torch.full((40, 2), 7)):
            rows, offsets, _ = qt.permute(torch.randn(40, 8), indices, 8, pad=pad, capacity=capacity)
            assert (offsets % pad == 0).all() and offsets.dtype is torch.int32 and offsets[-1] <= len(rows)
            shapes.add(tuple(rows.shape))
        assert len(shapes) == 1


def test_an_infinity_stays_with_the_tokens_that_have_it() -> None:
    x = torch.randn(6, 4)
    x[2], x[4, 1] = torch.nan, torch.inf
    indices = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1], [2, 1], [0, 3]])
    rows, _, places = qt.permute(x, indices, 4, pad=8, capacity=2)
    assert (places < 0).any()
    y = qt.unpermute(rows, places, 2, torch.rand(6, 2))
    assert y[[0, 1, 3, 5]].isfinite().all() and y[2].isnan().all()


def test_gradients_match_finite_differences_twice() -> None:
    indices = drawn(7, 4, 2)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    for pad, capacity in ((1, None), (4, None), (4, 2)):

        def through(x: Tensor, weights: Tensor, pad: int = pad, capacity: int | None = capacity) -> Tensor:
            rows, _, places = qt.permute(x, indices, 4, pad=pad, capacity=capacity)
            return qt.unpermute(rows.tanh(), places, 2, weights)

        assert torch.autograd.gradcheck(through, (x, weights))
        assert torch.autograd.gradgradcheck(through, (x, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_in_float32_in_the_order_of_choices(dtype: torch.dtype) -> None:
    indices, g = drawn(33, 8, 4), torch.randn(160, 16).to(dtype)
    x = torch.randn(33, 16).to(dtype).requires_grad_()
    rows, _, places = qt.permute(x, indices, 8, pad=4)
    (of_x,) = torch.autograd.grad(rows, x, g[: len(rows)])
    wide = g[: len(rows)].float()
    each = wide[places.view(33, 4)]
    assert_bitwise(of_x, (((each[:, 0] + each[:, 1]) + each[:, 2]) + each[:, 3]).to(dtype))


MOVED = {name: spec for name, spec in SPECS.items() if not why_not_rows(spec)}
REFUSED = {name: spec for name, spec in SPECS.items() if why_not_rows(spec)}


def _all_equal(a: Quantized, b: Quantized) -> None:
    assert_bitwise(a.codes(), b.codes())
    assert_bitwise(a.scales(), b.scales())
    assert a.shape == b.shape and a.spec == b.spec
    if isinstance(b.scale, Tensor):
        assert_bitwise(a.scale, b.plain().scale)
    if b.tensor_factor is not None:
        assert_bitwise(a.tensor_factor, b.tensor_factor)


@pytest.mark.parametrize("name", MOVED)
def test_quantizing_commutes_with_moving_rows(name: str) -> None:
    spec, indices = MOVED[name], drawn(33, 6, 2)
    # Every token goes somewhere, and so what all have alike is alike.
    for kind, x in nasty((33, 70)).items():
        tokens = torch.from_numpy(x)
        for pad in (1, 16):
            moved = qt.permute(qt.quantize(tokens, spec), indices, 6, pad=pad)
            rows, offsets, places = qt.permute(tokens, indices, 6, pad=pad)
            _all_equal(moved.rows, qt.quantize(rows, spec))
            assert torch.equal(moved.offsets, offsets) and torch.equal(moved.places, places), kind


@pytest.mark.parametrize("name", REFUSED)
def test_scales_of_several_rows_and_noise_are_refused(name: str) -> None:
    spec = REFUSED[name]
    assert spec.rounding != "nearest" or (spec.block[0] or 2) > 1
    with pytest.raises(ValueError, match=r"rounds stochastically|only with one scale per row"):
        qt.permute(qt.quantize(torch.randn(16, 32), spec), drawn(16, 6, 2), 6)


def test_inputs_of_which_recipes_may_move() -> None:
    # The table that docs/blocks/experts.md has.
    inputs = {name: build().fprop.a for name, build in RECIPES.items()}
    moved = {name for name, spec in inputs.items() if spec is not None and not why_not_rows(spec)}
    assert moved == {name for name in inputs if name not in ("bf16",)}, moved


def test_an_empty_batch_is_permuted() -> None:
    indices = torch.empty(0, 2, dtype=torch.int64)
    x = torch.empty(0, 8, requires_grad=True)
    rows, offsets, places = qt.permute(x, indices, 3, pad=16)
    assert rows.shape == (0, 8) and offsets.tolist() == [0, 0, 0] and places.shape == (0,)
    qt.unpermute(rows, places, 2, torch.empty(0, 2)).sum().backward()
    spec = RECIPES["mxfp8"]().fprop.a
    assert spec is not None
    assert qt.permute(qt.quantize(x, spec), indices, 3).rows.shape == (0, 8)


def test_choices_of_no_expert_here_have_no_row() -> None:
    x = torch.randn(3, 4)
    rows, offsets, places = qt.permute(x, torch.tensor([[1, 4], [-1, 0], [2, 2]]), 2)
    assert places.tolist() == [1, -1, -1, 0, -1, -1] and offsets.tolist() == [1, 2]
    y = qt.unpermute(rows, places, 2)
    assert_bitwise(y, torch.stack([x[0], x[1], torch.zeros(4)]))
    # An expert that was chosen twice has two rows.
    assert qt.permute(x, torch.tensor([[1, 1], [0, 1], [0, 0]]), 2).offsets.tolist() == [3, 6]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a capacity that drops all": ({"capacity": 0}, "a capacity of 0 drops every token"),
    "pad": ({"pad": 0}, "pad is 0"),
    "experts": ({"experts": 0}, "0 experts"),
    "floats": ({"indices": torch.rand(5, 2)}, "indices are integers"),
    "flat": ({"indices": torch.zeros(10, dtype=torch.int64)}, "indices are integers"),
    "a share of a row": ({"capacity": 1.5}, "capacity is 1.5; give a whole number"),
    "a float": ({"pad": 2.0}, "pad is 2.0; give a whole number"),
    "other tokens": ({"indices": torch.zeros(4, 2, dtype=torch.int64)}, "of the same tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_inputs_are_refused(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        qt.permute(torch.randn(5, 8), **({"indices": drawn(5, 4, 2), "experts": 4} | options))


def test_transforms_and_non_tensors_give_a_clear_error() -> None:
    x, indices = torch.randn(5, 8), drawn(5, 4, 2)
    rows, _, places = qt.permute(x, indices, 4)
    with pytest.raises(NotImplementedError, match="permute and unpermute do not run under"):
        torch.func.vmap(lambda t: qt.permute(t, indices, 4).rows)(x[None])
    with pytest.raises(NotImplementedError, match="permute and unpermute do not run under"):
        torch.func.grad(lambda t: qt.unpermute(t, places, 2).sum())(rows)
    with pytest.raises(TypeError, match="permute: x is a list; give a Tensor"):
        qt.permute(x.tolist(), indices, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="route: logits is a ndarray; give a Tensor"):
        qt.route(x.numpy(), 2)  # type: ignore[arg-type]


def test_sums_of_other_rows_are_refused() -> None:
    rows, _, places = qt.permute(torch.randn(5, 8), drawn(5, 4, 2), 4)
    with pytest.raises(ValueError, match="places"):
        qt.unpermute(rows, places, 3)
    with pytest.raises(ValueError, match="weights are one for each of 5 tokens and 2 choices"):
        qt.unpermute(rows, places, 2, torch.rand(5, 3))
    with pytest.raises(ValueError, match="places are integers"):
        qt.unpermute(rows, places.float(), 2)
