"""All ranks' parts together are the operand that the whole weight is quantized to: codes and scales, bit for bit."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel.fsdp.scales import (
    GatheredModelState,
    GatheredWeightState,
    OperandAmaxes,
    WeightOperand,
    own_amaxes,
    quantize_rows,
    weight_operands,
)

RECIPES: dict[str, Callable[[], Recipe]] = {
    **{name: function for name, function in recipes.RECIPES.items() if name != "bf16"},
    "mxfp8 with 2-D weights": lambda: recipes.mxfp8(weight_2d=True),
    "nvfp4 with 1-D weights": lambda: recipes.nvfp4(weight_2d=False),
    "nvfp4 with a float32 factor": lambda: recipes.nvfp4(power_of_two=False),
    "tensorwise with float32 scales": lambda: recipes.tensorwise(power_of_two=False),
    "rowwise with float32 scales": lambda: recipes.rowwise(power_of_two=False),
}
#: Even and uneven shards, ranks without rows, and a last shard that ends within a block.
SHAPES = [(64, 48, 2), (100, 33, 2), (300, 132, 4), (10, 17, 4), (5, 32, 4), (1, 16, 2), (130, 130, 3), (0, 16, 2)]
SHAPES += [(47, 33, 3), (63, 48, 2), (255, 40, 2), (383, 130, 3), (256, 130, 4)]


def values(kind: str, n: int, k: int) -> Tensor:
    x = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * torch.logspace(-3, 3, max(n, 1))[:n, None]
    if n and kind != "ordinary":
        x[n // 2, k // 2] = {"NaN": math.nan, "infinity": -math.inf, "huge": 3e38, "subnormal": 1e-42}.get(kind, 0.0)
    if kind == "zeros":
        x = torch.zeros(n, k)
    return x


def together(x: Tensor, operand: WeightOperand, ranks: int, factor: float | None = None) -> qt.Quantized:
    """Quantize and concatenate as ranks do."""
    n = x.shape[0]
    own = -(-n // ranks)
    rows = [torch.nn.functional.pad(x[r * own :][:own], (0, 0, 0, own - len(x[r * own :][:own]))) for r in range(ranks)]
    of_tensor = (operand.spec.two_level or factor is not None) and not operand.spec.per_tensor
    measured = [own_amaxes(each, operand, operand.block[0] is None, of_tensor) for each in rows]
    agreed = OperandAmaxes(
        *(None if of[0] is None else torch.stack(of).amax(0) for of in zip(*measured, strict=True))  # type: ignore[arg-type]
    )
    shards = [quantize_rows(each, operand, agreed, factor) for each in rows]
    return shards[-1].assemble([torch.cat(of) for of in zip(*(each.sent for each in shards), strict=True)], n)


def cuts_blocks(recipe: Recipe, n: int, k: int, ranks: int) -> str:
    layer: Any = qt.Linear(1, 1)
    weight = GatheredWeightState(GatheredModelState(layer), layer, "", recipe, (n, k))
    weight.mesh = SimpleNamespace(size=lambda: ranks)
    return weight.why_high_precision


def assert_equal(q: qt.Quantized, expected: qt.Quantized, where: str) -> None:
    assert q.shape == expected.shape and q.spec == expected.spec, where
    assert torch.equal(q.codes(), expected.codes()), f"{where}: codes"
    scales, wanted = q.scales(), expected.scales()
    assert scales.shape == wanted.shape, where
    assert torch.equal(scales.nan_to_num(-1.0), wanted.nan_to_num(-1.0)), f"{where}: scales"


@pytest.mark.parametrize("kind", ["ordinary", "zeros", "NaN", "infinity", "huge", "subnormal"])
@pytest.mark.parametrize("name", RECIPES)
def test_joined_parts_equal_the_whole(name: str, kind: str) -> None:
    recipe, compared = RECIPES[name](), 0
    for n, k, ranks in SHAPES:
        if cuts_blocks(recipe, n, k, ranks):
            continue
        x, compared = values(kind, n, k), compared + 1
        for operand in weight_operands(recipe):
            for factor in (None,) if recipe.delayed is None else (0.0, 4.0):
                q = together(x, operand, ranks, factor)
                expected = qt.quantize(x.t() if operand.transposed else x, operand.spec, factor=factor)
                assert_equal(q, expected, f"{(n, k, ranks)}, {operand.gemm}, factor {factor}")
                if factor is not None:
                    assert q.amax is not None and expected.amax is not None
                    largest = torch.as_tensor(expected.amax).reshape(()), torch.as_tensor(q.amax).reshape(())
                    assert torch.equal(*(t.nan_to_num(-1.0) for t in largest))
    assert compared >= 4


@pytest.mark.parametrize("height", [1, 16, 32, 128])
def test_shards_that_end_within_a_block_are_known(height: int) -> None:
    base = recipes.get("blockwise")
    assert base.fprop.b is not None and base.dgrad.b is not None
    fprop, dgrad = replace(base.fprop.b, block=(height, 16)), replace(base.dgrad.b, block=(16, height))
    recipe = replace(base, fprop=replace(base.fprop, b=fprop), dgrad=replace(base.dgrad, b=dgrad))
    for n, k, ranks in SHAPES:
        ends = [len(part) for part in torch.empty(n).chunk(ranks)]
        positions = [sum(ends[:i]) for i in range(1, len(ends))]
        assert bool(cuts_blocks(recipe, n, k, ranks)) == any(end % height for end in positions), (n, ranks)
