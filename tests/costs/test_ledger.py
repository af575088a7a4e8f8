"""Bytes, FLOPs and seconds follow from the table of operands."""

import dataclasses

import pytest

from quaver import E2M1, E4M3, E5M2, GemmSpec, QuantSpec, Recipe
from quaver.costs import ledger
from quaver.costs.hardware import GPUS
from quaver.costs.ledger import LAUNCH, LinearCost, QuantizedCopy, kind, quantization
from quaver.recipes import RECIPES, get
from tests.pairs import alternating

T, K, N = 8192, 4096, 2048
ELEMENTS = {"input": T * K, "weight": N * K, "grad_output": T * N}

#: Bytes an element of input, weight and grad_output, on Hopper and on Blackwell: reads of two, codes of one (NVFP4:
#: half) and scales, values of two. Derived by hand from the kernels.
BYTES = {
    "bf16": ((0, 0, 0), (0, 0, 0)),
    "delayed": ((4, 4, 4), (3, 3, 3)),
    "tensorwise": ((6, 6, 6), (5, 5, 5)),
    "rowwise": ((6, 6, 6), (6, 6, 6)),
    "rowwise_bf16_wgrad": ((3, 6, 3), (3, 6, 3)),
    "blockwise": ((4 + 8 / 128, 4, 4 + 8 / 128), (4 + 8 / 128, 4, 4 + 8 / 128)),
    # Emulated: bf16 values of both directions, but the input is saved in eight bits, in any format.
    "mxfp8": ((5 + 1 / 32, 6, 6), (4 + 2 / 32,) * 3),
    "mxfp6": ((5 + 1 / 32, 6, 6),) * 2,
    "mxfp4": ((5 + 1 / 32, 6, 6),) * 2,
    "nvfp4": ((6.5 + 1 / 16, 6, 8), (5 + 2 / 16, 5 + 2 / 256, 5 + 2 / 16)),
}


def per_element(cost: LinearCost) -> tuple[float, ...]:
    return tuple(cost.tensors[name].bytes / size for name, size in ELEMENTS.items())


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize(("gpu", "column"), [("h200", 0), ("b200", 1)])
def test_bytes_per_element_match_the_kernels(name: str, gpu: str, column: int) -> None:
    cost = ledger.layer(get(name), T, K, N, gpu)
    assert per_element(cost) == pytest.approx(BYTES[name][column], abs=0.01)


@pytest.mark.parametrize(("gpu", "name"), alternating(GPUS, RECIPES, ["h100", "b200"]))
def test_flops_match_three_gemms_and_no_recipe_beats_its_rates(name: str, gpu: str) -> None:
    cost = ledger.layer(get(name), T, K, N, gpu)
    rates = GPUS[gpu].rates
    assert cost.flops == 3 * 2 * T * K * N
    fastest = max(rates[g.kind if g.native else "bf16"].value for g in cost.gemms.values())
    assert 0 < cost.speedup <= max(1.0, fastest / rates["bf16"].value) * 1.001
    assert cost.seconds > cost.bytes / (GPUS[gpu].copy.value * 1e12)


def test_bf16_is_the_baseline() -> None:
    cost = ledger.layer(get("bf16"), T, K, N, "h100")
    assert cost.speedup == 1 and cost.bytes == 0 and not cost.emulated


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("bf16", "bf16 bf16 bf16"),
        ("delayed", "tensor tensor tensor"),
        ("tensorwise", "tensor tensor tensor"),
        ("rowwise", "row row row"),
        ("rowwise_bf16_wgrad", "row row bf16"),
        ("blockwise", "block block block"),
        ("mxfp8", "mx mx mx"),
        ("nvfp4", "nvfp4 nvfp4 nvfp4"),
    ],
)
def test_the_kind_of_a_gemm_follows_from_its_specs(name: str, kinds: str) -> None:
    assert [kind(spec) for spec in get(name).gemms.values()] == kinds.split()


def test_a_recipe_that_nobody_has_seen_is_priced() -> None:
    square, row = QuantSpec(E4M3, (128, 128), "fp32"), QuantSpec(E4M3, (1, 128), "fp32")
    recipe = Recipe("mine", GemmSpec(row, square), GemmSpec(row, square), GemmSpec(row, row))
    cost = ledger.layer(recipe, T, K, N, "h200")
    assert [g.kind for g in cost.gemms.values()] == ["block"] * 3 and not cost.emulated
    assert per_element(cost) == pytest.approx((4 + 8 / 128, 4 + 8 / 128**2, 4 + 8 / 128), rel=1e-4)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (QuantSpec(E4M3, (1, 64)), QuantSpec(E4M3, (64, 64))),
        (QuantSpec(E4M3, (1, 128)), QuantSpec(E4M3)),
        (QuantSpec(E4M3, (128, 128)), QuantSpec(E4M3, (128, 128))),
        (QuantSpec(E5M2), QuantSpec(E5M2)),
        (QuantSpec(E4M3, (1, 16), "e8m0"), QuantSpec(E4M3, (1, 32), "e8m0")),
        (QuantSpec(E2M1, (1, 16), "e8m0"), QuantSpec(E2M1, (1, 16), "e8m0")),
    ],
    ids=str,
)
def test_formats_without_gpu_support_are_emulated(a: QuantSpec, b: QuantSpec) -> None:
    spec = GemmSpec(a, b)
    assert kind(spec) == "other"
    assert not ledger.gemm(spec, T, N, K, GPUS["h200"]).native


def test_blackwell_runs_blocks_of_128_as_mxfp8_where_scales_are_powers_of_two() -> None:
    for power_of_two in (True, False):
        cost = ledger.layer(get("blockwise", power_of_two=power_of_two), T, K, N, "b200")
        assert bool(cost.emulated) is not power_of_two
        assert {g.kind for g in cost.gemms.values()} == {"mx" if power_of_two else "block"}


def test_a_number_of_columns_that_no_gemm_takes_is_emulated() -> None:
    assert ledger.layer(get("tensorwise"), T, K, 1000, "h200").emulated == ["fprop"]
    assert ledger.layer(get("tensorwise"), T, 1000, N, "h200").emulated == ["dgrad", "wgrad"]
    assert not ledger.layer(get("tensorwise"), 1001, K, N, "h200").emulated


def test_options_change_the_price_where_they_change_the_bytes() -> None:
    own = ledger.layer(get("mxfp8"), T, K, N, "b200").tensors["weight"].bytes
    square = ledger.layer(get("mxfp8", weight_2d=True), T, K, N, "b200").tensors["weight"].bytes
    assert square < own
    assert ledger.layer(get("delayed", margin=2), T, K, N, "h200") == ledger.layer(get("delayed"), T, K, N, "h200")


def test_weights_are_shared_by_micro_batches_and_nothing_else_is() -> None:
    once, often = (ledger.layer(get("tensorwise"), T, K, N, "h200", micro_batches=n) for n in (1, 8))
    assert often.tensors["weight"].bytes == once.tensors["weight"].bytes / 8
    assert often.tensors["input"] == once.tensors["input"] and often.gemms == once.gemms
    assert often.speedup > once.speedup


@pytest.mark.parametrize(
    ("name", "bytes_an_element"),
    [("delayed", 0), ("blockwise", 8 / 128), ("mxfp8", 2 / 32), ("tensorwise", 4), ("rowwise", 4)],
)
def test_a_producer_writes_codes_in_place_of_bf16_or_measures_for_nothing(name: str, bytes_an_element: float) -> None:
    gpu = "b200" if name == "mxfp8" else "h200"
    cost = ledger.layer(get(name), T, K, N, gpu, produced=True)
    bytes_of_gemms = per_element(cost)
    assert (bytes_of_gemms[0], bytes_of_gemms[2]) == pytest.approx((bytes_an_element, bytes_an_element), abs=0.01)
    assert bytes_of_gemms[1] == per_element(ledger.layer(get(name), T, K, N, gpu))[1]


def test_a_producer_never_costs_less_than_nothing() -> None:
    one = [QuantizedCopy(get("delayed").fprop.a)]
    assert quantization(one, T, K, GPUS["h200"], delayed=True, produced=True).bytes == 0


def test_copies_made_separately_read_the_tensor_each() -> None:
    recipe, gpu = get("rowwise"), GPUS["h200"]
    wanted = ledger.copies(recipe, gpu)["input"]
    assert quantization(wanted, T, K, gpu).bytes == pytest.approx(6 * T * K, rel=1e-3)
    separate = sum(quantization([copy], T, K, gpu).bytes for copy in wanted)
    assert separate == pytest.approx((3 + 5) * T * K, rel=1e-3)


@pytest.mark.parametrize("at_once", [True, False])
def test_unsupported_gemms_run_in_bf16(at_once: bool) -> None:
    plain = ledger.layer(get("bf16"), T, K, N, "l40s")
    cost = ledger.layer(get("blockwise", power_of_two=at_once), T, K, N, "l40s")
    assert cost.emulated == ["fprop", "dgrad", "wgrad"] and cost.speedup < 1
    for name, gemm in cost.gemms.items():
        assert gemm.seconds == plain.gemms[name].seconds
    # wgrad's product is too small to be written in bf16; the others, of 2**24 elements and more, are not.
    assert [m * n >= ledger.FILLS for m, n in ((T, N), (T, K), (N, K))] == [True, True, False]
    operands = 2 * (T * K + N * K + T * N)
    decoded = T * K * (3 + 1 / 128) if at_once else 3 * operands
    assert sum(g.decoding.bytes for g in cost.gemms.values()) == decoded + 8 * N * K


@pytest.mark.parametrize(("size", "launches"), [(4096, 7), (512, 9)])
def test_an_emulated_layer_takes_few_launches(size: int, launches: int) -> None:
    """As they are recorded: tests.torch.backends.gpu.launch_counts."""
    for name, more in (("mxfp8", 0), ("nvfp4", 3)):
        cost = ledger.layer(get(name), size, size, size, "h100")
        passes = [*cost.tensors.values(), *(gemm.decoding for gemm in cost.gemms.values())]
        assert 3 + sum(one.kernels for one in passes) == launches + more
        assert cost.seconds < 1.5 * cost.bf16_seconds or size < 4096


def test_small_layers_do_not_gain_and_large_ones_do() -> None:
    gains = [ledger.layer(get("tensorwise"), n, n, n, "h100").speedup for n in (64, 256, 1024, 4096, 16_384)]
    assert gains == sorted(gains) and gains[0] < 1 < gains[-1]


def test_a_layer_of_one_element_costs_its_launches() -> None:
    cost = ledger.layer(get("delayed"), 1, 1, 1, "h200")
    # Three quantizations and three GEMMs; each GEMM decodes two operands, has one column, and is rounded.
    assert cost.seconds == pytest.approx(15 * LAUNCH, rel=1e-3)
    assert cost.bf16_seconds == pytest.approx(3 * LAUNCH, rel=1e-3)


def test_faster_memory_speeds_up_only_memory_bound_work() -> None:
    card = GPUS["h200"]
    fast = dataclasses.replace(card, copy=card.copy.times(2, "twice as fast, for this test"))
    for name in ("tensorwise", "bf16"):
        slow_cost, fast_cost = (ledger.layer(get(name), T, K, N, g) for g in (card, fast))
        assert (fast_cost.seconds < slow_cost.seconds) is (name == "tensorwise")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, "h100"), "tokens is 0"),
        ((1, 0, 1, "h100"), "in_features is 0"),
        ((1, 1, -1, "h100"), "out_features is -1"),
        ((1, 1, 1, "h100x"), "did you mean 'h100'"),
    ],
)
def test_bad_input_gives_a_clear_error(arguments: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger.layer(get("tensorwise"), *arguments)


def test_no_micro_batches_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="micro_batches is 0"):
        ledger.layer(get("tensorwise"), 1, 1, 1, "h100", micro_batches=0)
