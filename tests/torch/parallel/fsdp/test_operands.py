"""All ranks' parts together are the operand that the whole weight is quantized to: codes and scales, bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel.fsdp.operands import (
    OperandGather,
    RowShard,
    WeightOperand,
    amaxes,
    crossing_blocks,
    pieces,
    quantize_shard,
    scale_buffer_shape,
    tensor_amax,
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
#: Even, uneven, ranks without rows, blocks on more than two ranks.
SHAPES = [(64, 48, 2), (100, 33, 2), (300, 132, 4), (10, 17, 4), (5, 32, 4), (1, 16, 2), (130, 130, 3), (0, 16, 2)]


def values(kind: str, n: int, k: int) -> Tensor:
    x = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * torch.logspace(-3, 3, max(n, 1))[:n, None]
    if n and kind != "ordinary":
        x[n // 2, k // 2] = {"NaN": math.nan, "infinity": -math.inf, "huge": 3e38, "subnormal": 1e-42}.get(kind, 0.0)
    if kind == "zeros":
        x = torch.zeros(n, k)
    return x


def together(x: Tensor, operand: WeightOperand, ranks: int, factor: float | None = None) -> qt.Quantized:
    """As ranks do it."""
    n, k = x.shape
    rows = [RowShard.of(n, ranks, rank) for rank in range(ranks)]
    own = [amaxes(x[r.start : r.stop], operand, r, operand.spec.two_level or factor is not None) for r in rows]
    agreed = {block: torch.stack([each[block] for each in own]).amax(0) for block in own[0]}
    parts = [quantize_shard(x[r.start : r.stop], operand, r, agreed, factor) for r in rows]
    joint = OperandGather(operand, (n, k), rows[0], parts[-1], tensor_amax(agreed))
    gathered = [torch.cat([p.codes for p in parts])]
    if parts[0].scales is not None:
        gathered.append(torch.cat([p.scales for p in parts if p.scales is not None]))
    shape = scale_buffer_shape(operand, rows[0], k)
    return joint.assemble(gathered, None if shape is None else torch.full(shape, 77, dtype=torch.uint8))


def assert_equal(q: qt.Quantized, expected: qt.Quantized, where: str) -> None:
    assert q.shape == expected.shape and q.spec == expected.spec, where
    assert torch.equal(q.codes(), expected.codes()), f"{where}: codes"
    scales, wanted = q.scales(), expected.scales()
    assert scales.shape == wanted.shape, where
    assert torch.equal(scales.nan_to_num(-1.0), wanted.nan_to_num(-1.0)), f"{where}: scales"


@pytest.mark.parametrize("kind", ["ordinary", "zeros", "NaN", "infinity", "huge", "subnormal"])
@pytest.mark.parametrize("name", RECIPES)
def test_joined_parts_equal_the_whole(name: str, kind: str) -> None:
    recipe = RECIPES[name]()
    for n, k, ranks in SHAPES:
        x = values(kind, n, k)
        for operand in weight_operands(recipe):
            for factor in (None,) if recipe.delayed is None else (0.0, 4.0):
                q = together(x, operand, ranks, factor)
                expected = qt.quantize(x.t() if operand.transposed else x, operand.spec, factor=factor)
                assert_equal(q, expected, f"{(n, k, ranks)}, {operand.gemm}, factor {factor}")
                if factor is not None:
                    assert q.amax is not None and expected.amax is not None
                    largest = torch.as_tensor(expected.amax).reshape(()), torch.as_tensor(q.amax).reshape(())
                    assert torch.equal(*(t.nan_to_num(-1.0) for t in largest))


@pytest.mark.parametrize("height", [None, 1, 16, 32, 128])
def test_segments_cover_all_rows_and_name_blocks_that_cross_ranks(height: int | None) -> None:
    for n, _, ranks in SHAPES:
        rows = [RowShard.of(n, ranks, rank) for rank in range(ranks)]
        assert torch.equal(
            torch.tensor([r.stop - r.start for r in rows][: len(torch.empty(n).chunk(ranks))]),
            torch.tensor([len(c) for c in torch.empty(n).chunk(ranks)]),
        ), "as torch deals them out"
        every = [(r, p) for r in rows for p in pieces(r, height)]
        assert [i for _, p in every for i in range(p.start, p.stop)] == list(range(n))
        holders: dict[int, set[int]] = {}
        for rank, r in enumerate(rows):
            for row in range(r.start, r.stop):
                holders.setdefault(0 if height is None else row // height, set()).add(rank)
        on_several = sorted(block for block, who in holders.items() if len(who) > 1)
        if height is None:
            on_several = [0]
        assert crossing_blocks(rows[0], height) == on_several
        for _, p in every:
            assert p.crosses_shards == (p.block in on_several)
