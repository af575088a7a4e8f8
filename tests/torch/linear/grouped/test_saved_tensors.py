"""Test that group scales saved for backward in one byte each are restored exactly."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import quaver.torch as qt
from benchmarks.cases.linear import grouped as case
from benchmarks.measuring.memory import kept_bytes
from quaver import recipes
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import Block, QuantSpec
from quaver.torch.linear.grouped.saved import SavedLayout
from quaver.torch.numerics.grouped import GroupOffsets
from quaver.torch.numerics.quantized import Quantized
from tests.close import assert_bitwise
from tests.pairs import case_name, pairs

SMALLEST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max
#: Amaxes of the columns.
HARD = (0.0, -0.0, 1e-45, 2.0**-127, SMALLEST, 1.5 * SMALLEST, 2.0**-119, 2.0**-118, 1.0, 448.0, 449.0, 1e30, LARGEST)
NOT_FINITE = (torch.nan, -torch.nan, torch.inf, -torch.inf)
SIZES = (5, 0, 1, 130, 64, 0)


def saved_and_read(
    parts: list[Quantized | None], sizes: tuple[int, ...], fprop_rows: bool = False
) -> tuple[tuple[Tensor, ...], Any]:
    """The tensors saved for operands of all groups, and the operands read from them."""
    of = next(q for q in parts if q is not None)
    offsets = GroupOffsets(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32), sum(sizes))
    rows = fprop_rows or of.spec.transposable
    layout = SavedLayout(of.spec, fprop_rows, rows, offsets.rows, len(sizes), of.shape[1 if fprop_rows else 0])
    taken = layout.flat(parts)
    for padded, exact in zip(layout.flat(parts, padded=True), taken, strict=True):
        assert torch.equal(padded[: len(exact)], exact)
    return taken, layout.operand(taken, offsets)


def test_all_stored_scales_are_restored() -> None:
    """The bits of each power of two that an encode factor's bounds admit; NaN stays NaN."""
    spec = QuantSpec(E4M3, (1, None))
    scales = torch.tensor([[2.0**-p] for p in range(-126, 128)] + [[torch.nan], [-torch.nan]], dtype=torch.float64)
    q = Quantized(torch.zeros(len(scales), 3).to(torch.float8_e4m3fn), scales.float(), spec, (len(scales), 3))
    taken, again = saved_and_read([None, q, None], (0, len(scales), 0), fprop_rows=True)
    assert taken[1].nbytes == len(scales)
    assert again[0] is again[2] is None and again[1] is not None and isinstance(again[1].scale, Tensor)
    assert_bitwise(again[1].scale, q.scale)


def columns(rows: int, k: int, seed: int) -> Tensor:
    """Normal columns with magnitudes up to 2**±60 apart, mixed with columns of `HARD` and nonfinite ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) * 2.0 ** torch.randint(-60, 61, (k,), generator=generator)
    for column, value in enumerate((*HARD, *NOT_FINITE)):
        if rows:
            x[:, column] = x[:, column].sign() * 1e-45
            x[int(torch.randint(rows, (), generator=generator)), column] = value
    return x


@pytest.mark.parametrize(
    ("way", "seed", "block", "fmt"),
    pairs(("reference", None), range(3), ((1, None), (1, 128), (1, 32), (32, 32)), (E4M3, E5M2)),
    ids=case_name,
)
def test_scales_of_hard_values_are_read_as_they_were_stored(fmt: Any, block: Block, seed: int, way: str | None) -> None:
    spec, x = QuantSpec(fmt, block), columns(sum(SIZES), 48, seed)
    parts: list[Quantized | None] = []
    with qt.only(way) if way else nullcontext():
        for part in x.split(SIZES):
            q = qt.quantize(part.t(), spec) if len(part) else None
            parts.append(q.T if q is not None and spec.transposable else q)
    for q, again in zip(parts, saved_and_read(parts, SIZES, spec.transposable)[1], strict=True):
        assert (q is None) is (again is None)
        if q is not None and again is not None:
            assert_bitwise(again.scale, q.scale)
            assert_bitwise(again.dequantize(), q.dequantize())
            assert (again.shape, again.transposed) == (q.shape, q.transposed)


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(E4M3),
        QuantSpec(E4M3, (1, None), "fp32"),
        recipes.get("mxfp8").wgrad.b,
        recipes.get("nvfp4").wgrad.b,
    ],
    ids=str,
)
def test_other_scales_stay_unchanged(spec: QuantSpec) -> None:
    q = qt.quantize(torch.randn(32, 16).t(), spec)
    taken, (again,) = saved_and_read([q], (32,))
    assert taken[1].nbytes == (4 if isinstance(q.scale, float) else q.scale.nbytes)
    scales = (again.scale, q.scale) if isinstance(q.scale, Tensor) else map(torch.tensor, (again.scale, q.scale))
    assert_bitwise(*(scale.contiguous() for scale in scales))
    assert_bitwise(again.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    ("compiled", "hard", "recipe"), pairs((False, True), (HARD, NOT_FINITE), ("rowwise", "blockwise")), ids=case_name
)
def test_gradients_of_hard_values_match_linears(recipe: str, hard: tuple[float, ...], compiled: bool) -> None:
    generator, k, n = torch.Generator().manual_seed(0), 48, 40
    x, g = (torch.randn(sum(SIZES), size, generator=generator) for size in (k, n))
    w = torch.randn(len(SIZES), n, k, generator=generator)
    for column, value in enumerate(hard):
        x[:, column] *= 1e-20
        # In the groups of one token, of 130 and of 64.
        x[[5, 6 + column, 150], column] = value
    layer = qt.GroupedLinear(len(SIZES), k, n, bias=False, recipe=recipe)
    layer.weight.data.copy_(w)
    offsets = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    run: Any = layer
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(lambda x, offsets: layer(x, offsets), backend=aot_eager, fullgraph=True)
    given = x.clone().requires_grad_()
    y = run(given, offsets)
    y.backward(g)
    assert given.grad is not None and layer.weight.grad is not None
    for group, (start, size) in enumerate(zip([0, *offsets.tolist()], SIZES, strict=False)):
        if size == 0:
            assert not layer.weight.grad[group].any()
            continue
        one = qt.Linear(k, n, bias=False, recipe=recipe)
        one.set_weight(w[group])
        rows = slice(start, start + size)
        alone = x[rows].clone().requires_grad_()
        out = one(alone)
        out.backward(g[rows].clone())
        assert alone.grad is not None and one.weight.grad is not None
        assert_bitwise(y[rows].detach(), out.detach(), f"output of group {group}")
        assert_bitwise(given.grad[rows], alone.grad, f"input's gradient of group {group}")
        assert_bitwise(layer.weight.grad[group], one.weight.grad, f"weight's gradient of group {group}")


@pytest.mark.parametrize("recipe", case.SAVING)
def test_64_tokens_a_group_keep_at_most_52_percent_of_bf16s_bytes(recipe: str) -> None:
    """For 16 groups of 13 to 137 tokens with 256 features: one byte per element and one per column of a block."""
    layer = qt.GroupedLinear(16, 256, 512, bias=False, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor(case.RESEARCH_SHAPE.sizes()).cumsum(0, dtype=torch.int32)
    saved = kept_bytes(lambda x: layer(x, offsets), x)
    assert saved <= 0.52 * x.nbytes, f"{recipe}: {100 * saved / x.nbytes:.1f} %"
