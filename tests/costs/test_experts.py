"""The cost model of grouped layers: what a GPU runs, and the bytes of the launches that were recorded."""

import pytest

from quaver import recipes
from quaver.costs import experts, ledger
from quaver.costs.hardware import GPUS

SHAPE = 8, 16_384, 4096, 14_336
KINDS = {
    ("h200", "tensorwise"): ["row", "codes", "codes"],
    ("h200", "rowwise"): ["row"] * 3,
    ("h200", "blockwise"): ["codes"] * 3,
    ("h200", "mxfp8"): ["bf16"] * 3,
    ("b200", "rowwise"): ["codes"] * 3,
    ("b200", "mxfp8"): ["mx"] * 3,
    ("b200", "nvfp4"): ["nvfp4"] * 3,
    ("a100", "tensorwise"): ["bf16"] * 3,
}


@pytest.mark.parametrize(("gpu", "recipe"), KINDS)
def test_a_gpu_runs_the_grouped_gemms_that_it_has(gpu: str, recipe: str) -> None:
    cost = experts.layer(recipes.get(recipe), *SHAPE, gpu)
    assert [gemm.kind for gemm in cost.gemms.values()] == KINDS[gpu, recipe]


@pytest.mark.parametrize(
    ("gpu", "recipe", "gigabytes"),
    [
        ("h200", "bf16", 0.0),
        ("h200", "tensorwise", 4.63),
        ("h200", "rowwise", 4.64),
        ("h200", "blockwise", 3.12),
        ("h200", "mxfp8", 4.78),
        ("h200", "nvfp4", 5.31),
        ("b200", "mxfp8", 3.15),
    ],
)
def test_bytes_are_those_of_the_recorded_launches(gpu: str, recipe: str, gigabytes: float) -> None:
    assert experts.layer(recipes.get(recipe), *SHAPE, gpu).bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_one_expert_costs_what_a_linear_layer_does() -> None:
    one = experts.layer(recipes.get("rowwise"), 1, 8192, 4096, 4096, "h200")
    dense = ledger.layer(recipes.get("rowwise"), 8192, 4096, 4096, "h200")
    assert one.seconds == pytest.approx(dense.seconds, rel=0.01)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        experts.layer(recipes.get("rowwise"), *sizes, "h200")


def test_codes_are_slower_than_torchs_gemms() -> None:
    card = GPUS["h200"]
    assert experts.rate("bf16", card) < experts.rate("codes", card) < experts.rate("row", card)
