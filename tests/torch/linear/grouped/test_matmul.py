"""grouped_matmul is a linear layer for each group of rows, forward and backward, under every recipe."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.numerics.grouped import GroupOffsets
from tests.close import assert_bitwise
from tests.pairs import case_name, pairs

T, K, N, G = 64, 48, 40, 4
#: Sizes of the groups: ragged, one empty, all in one, most tokens in none.
SIZES = [(5, 0, 40, 19), (64, 0, 0, 0), (0, 1, 2, 3), (0, 0, 0, 0)]
HIGH = GemmSpec(None, None)


def dequantizing(name: str, **left: GemmSpec) -> Recipe:
    """A recipe in which some GEMMs multiply the dequantized operands of fprop."""
    of = recipes.get(name)
    gemms = {"fprop": of.fprop, "dgrad": of.dgrad, "wgrad": of.wgrad, **left}
    return Recipe(f"dequantized {name}", **gemms, dequantized_backward=True)


def square_block_recipe(side: int) -> Recipe:
    """A recipe with square blocks for all operands, so that backward transposes the operands of the forward."""
    spec = QuantSpec(E4M3, (side, side))
    return Recipe(f"squares of {side}", *[GemmSpec(spec, spec)] * 3)


RECIPES: dict[str, Recipe] = {name: recipes.get(name) for name in recipes.RECIPES if name != "delayed"}
RECIPES |= {
    "tensorwise, dequantized": dequantizing("tensorwise", dgrad=HIGH, wgrad=HIGH),
    "mxfp8, dequantized": dequantizing("mxfp8", dgrad=HIGH, wgrad=HIGH),
    "rowwise, wgrad dequantized": dequantizing("rowwise", wgrad=HIGH),
    "nvfp4, dgrad dequantized": dequantizing("nvfp4", dgrad=HIGH),
    "squares of 1": square_block_recipe(1),
    "squares of 16": square_block_recipe(16),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w, g = (torch.randn(shape).to(dtype) for shape in ((T, K), (G, N, K), (T, N)))
    # Groups have different magnitudes, so a scale shared by two of them would be detected.
    x *= torch.logspace(-3, 3, T).to(dtype)[:, None]
    g *= torch.logspace(2, -4, T).to(dtype)[:, None]
    return x.requires_grad_(), w.requires_grad_(), g


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def grouped(
    sizes: tuple[int, ...], recipe: Any, dtype: torch.dtype = torch.float32, biased: bool = False, **how: Any
) -> list[Tensor]:
    x, w, g = tensors(dtype)
    bias = biases(dtype) if biased else None
    y = qt.grouped_matmul(x, w, ends(sizes), bias=bias, recipe=recipe, **how)
    y.backward(g)
    assert x.grad is not None and w.grad is not None
    of_bias = [] if bias is None or bias.grad is None else [bias.grad]
    return [y.detach(), x.grad, w.grad, *of_bias]


def biases(dtype: torch.dtype) -> Tensor:
    return torch.randn(G, N, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def group_by_group(
    sizes: tuple[int, ...], recipe: Any, dtype: torch.dtype = torch.float32, biased: bool = False
) -> list[Tensor]:
    """The same with one linear layer per group, named for its noise; rows without a group give zeros."""
    x, w, g = tensors(dtype)
    b = biases(dtype).detach()
    y, x_operand, w_operand, b_operand = (
        torch.zeros_like(g),
        torch.zeros_like(x),
        torch.zeros_like(w),
        torch.zeros_like(b),
    )
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        if size:
            layer: Any = qt.Linear(K, N, bias=biased, dtype=dtype, recipe=recipe)
            layer.qualified_name = f"grouped.{group}"
            layer.set_weight(w[group].detach())
            if biased:
                layer.bias.data.copy_(b[group])
            alone = x[rows].detach().clone().requires_grad_()
            out = layer(alone)
            out.backward(g[rows].clone())
            y[rows], x_operand[rows], w_operand[group] = out.detach(), alone.grad, layer.weight.grad
            if biased:
                b_operand[group] = layer.bias.grad
    return [y, x_operand.detach(), w_operand.detach(), *([b_operand] if biased else [])]


@every_recipe
@every_size
def test_groups_are_linear_layers_one_by_one(name: str, sizes: tuple[int, ...]) -> None:
    dtype = torch.bfloat16 if sizes == SIZES[2] else torch.float32
    how = dtype, sizes != SIZES[1]
    for tensor, expected in zip(
        grouped(sizes, RECIPES[name], *how), group_by_group(sizes, RECIPES[name], *how), strict=True
    ):
        assert_bitwise(tensor, expected)


@every_recipe
def test_the_reference_equals_linear_layers(name: str) -> None:
    with qt.only("reference"):
        for tensor, expected in zip(
            grouped(SIZES[0], RECIPES[name]), group_by_group(SIZES[0], RECIPES[name]), strict=True
        ):
            assert_bitwise(tensor, expected)


@pytest.mark.parametrize(
    ("transposed", "dtype", "features"),
    pairs((False, True), (torch.float32, torch.bfloat16, torch.float16), ((48, 40), (47, 40), (48, 41), (8, 8))),
    ids=case_name,
)
def test_torchs_grouped_gemm_changes_no_bit(
    features: tuple[int, int], dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (k, n), draw = features, torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=draw) for shape in ((T, k), (G, n, k), (T, n)))
    x[3, 2], x[44, 1], w[2, 5, 3], g[50, 4] = float("inf"), float("nan"), -0.0, float("-inf")
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if transposed else w
    calls: list[Any] = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **how: calls.append(args) or grouped_mm(*args, **how))
    for sizes in ((5, 0, 40, 17), (0, 0, 0, 0)):
        one, other = (t.clone().to(dtype).requires_grad_() for t in (x, w))
        y = qt.grouped_matmul(one, other, ends(sizes), recipe="bf16")
        y.backward(g.to(dtype))
        assert one.grad is not None and other.grad is not None and not y[sum(sizes) :].any()
        for group, (start, end) in enumerate(GroupOffsets(ends(sizes), T).bounds()):
            part, matrix, y_operand = one[start:end].detach(), other[group].detach(), g[start:end].to(dtype)
            assert_bitwise(y[start:end].detach(), F.linear(part, matrix))
            assert_bitwise(one.grad[start:end], y_operand @ matrix)
            assert_bitwise(other.grad[group].contiguous(), (y_operand.t() @ part).contiguous())
    lines = not any(size * dtype.itemsize % 16 for size in features)
    assert (len(calls) == 6) is lines


def test_rows_without_a_group_have_no_effect() -> None:
    for recipe in ("tensorwise", "rowwise", "mxfp8", None):
        x, w, _ = (t.detach() for t in tensors())
        x[40:] = float("nan")
        x.requires_grad_()
        w.requires_grad_()
        y = qt.grouped_matmul(x, w, ends((10, 0, 20, 10)), recipe=recipe)
        assert not y[40:].any()
        y.sum().backward()
        assert x.grad is not None and w.grad is not None
        assert not x.grad[40:].any() and w.grad.isfinite().all() and not w.grad[1].any()


@pytest.mark.parametrize("shape", [(0, 48, 40, 4), (8, 48, 40, 0), (8, 48, 0, 2), (8, 0, 40, 2)], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", None])
def test_nothing_to_multiply_gives_zeros(shape: tuple[int, ...], recipe: str | None) -> None:
    tokens, k, n, groups = shape
    x, w = torch.ones(tokens, k, requires_grad=True), torch.ones(groups, n, k, requires_grad=True)
    offsets = torch.full((groups,), tokens, dtype=torch.int32)
    y = qt.grouped_matmul(x, w, offsets, recipe=recipe)
    assert y.shape == (tokens, n) and not y.any()
    y.sum().backward()
    assert x.grad is not None and w.grad is not None and x.grad.shape == x.shape and not w.grad.any()


def test_noise_differs_by_step_and_name_and_is_the_same_again() -> None:
    first = grouped(SIZES[0], "nvfp4", count=1)
    assert all(torch.equal(a, b) for a, b in zip(first, grouped(SIZES[0], "nvfp4", count=1), strict=True))
    for how in ({"count": 2}, {"count": 1, "seed": 3}, {"count": 1, "name": "other"}):
        y, x_operand, w_operand = grouped(SIZES[0], "nvfp4", **how)
        assert torch.equal(y, first[0])
        assert not torch.equal(x_operand, first[1]) and not torch.equal(w_operand, first[2])


def test_the_ambient_recipe_and_autocast_hold() -> None:
    x, w, _ = tensors()
    offsets = ends(SIZES[0])
    with qt.autocast(recipe="rowwise"):
        assert_bitwise(qt.grouped_matmul(x, w, offsets), qt.grouped_matmul(x, w, offsets, recipe="rowwise"))
    with torch.autocast("cpu", torch.bfloat16):
        y = qt.grouped_matmul(x, w, offsets, recipe="rowwise")
        plain = qt.grouped_matmul(x, w, offsets)
    assert y.dtype is plain.dtype is torch.bfloat16
    y.float().sum().backward()
    assert w.grad is not None and w.grad.dtype is torch.float32
    exact = torch.cat([x[s:e] @ w[i].t() for i, (s, e) in enumerate(GroupOffsets(offsets, T).bounds())])
    assert (plain.double() - exact.double()).norm() < 1e-2 * exact.double().norm()


def test_a_frozen_side_gets_no_gradient() -> None:
    x, w, g = tensors()
    y = qt.grouped_matmul(x.detach(), w, ends(SIZES[0]), recipe="tensorwise")
    y.backward(g)
    other = qt.grouped_matmul(x, w.detach(), ends(SIZES[0]), recipe="tensorwise")
    other.backward(g)
    for grad, expected in zip((x.grad, w.grad), grouped(SIZES[0], "tensorwise")[1:], strict=True):
        assert grad is not None
        assert_bitwise(grad, expected)


def test_explain_says_what_runs() -> None:
    x, w, _ = tensors()
    explained = qt.explain(qt.grouped_matmul, x, w, ends(SIZES[0]), recipe="rowwise")
    rows = {row.what: row for row in explained.rows}
    assert [row.runs for row in explained.rows if row.what.endswith("GEMM")] == ["cpu, group by group"] * 3
    assert dict(rows["fprop GEMM"].passed_over)["native, grouped"] == "the tensor is not on a GPU"
    assert dict(rows["wgrad GEMM"].passed_over)["native, grouped"] == "the tensor is not on a GPU"
    assert "group by group" in repr(explained)


X, W, OFFSETS = torch.zeros(8, 4), torch.zeros(2, 3, 4), torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "w", "offsets", "sentence"),
    [
        (X, W[:1], OFFSETS, r"offsets \[groups\]"),
        (X, torch.zeros(2, 4, 3), OFFSETS, r"x is \[T, K\]"),
        (X, W, OFFSETS.long(), "convert them to torch.int32"),
        (X, W, torch.tensor([5, 3], dtype=torch.int32), "ascending"),
        (X, W, torch.tensor([5, 9], dtype=torch.int32), "among 8 rows"),
        (X, W, torch.tensor([-1, 8], dtype=torch.int32), "ascending"),
        (X.double(), W, OFFSETS, "not torch.float64"),
        (X.bfloat16(), W, OFFSETS, "convert one of them"),
        (X.to("meta"), W, OFFSETS, "move them to one"),
    ],
)
def test_bad_input_gives_a_clear_error(x: Tensor, w: Tensor, offsets: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qt.grouped_matmul(x, w, offsets, recipe="tensorwise")


def test_unsupported_transforms_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match="uses delayed scaling"):
        qt.grouped_matmul(X, W, OFFSETS, recipe="delayed")
    x = torch.randn(8, 4, requires_grad=True)
    y = qt.grouped_matmul(x, W + 1.0, OFFSETS, recipe="tensorwise")
    (x_operand,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        x_operand.sum().backward()
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.grad(lambda t: qt.grouped_matmul(t, W, OFFSETS, recipe="tensorwise").sum())(X)
