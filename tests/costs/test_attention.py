"""Attention's products are counted as its kernels take them, and its price follows from them."""

import pytest
import torch

from quaver.costs import decoder
from quaver.costs.hardware import GPUS, Gpu, GpuRate
from quaver.recipes import get
from quaver.recipes.spec import AttentionSpec
from quaver.torch.backends.gpu import attention as kernels
from quaver.torch.backends.gpu import device, launch
from quaver.torch.backends.gpu.tensorwise import integers

#: Written down by hand from the sweeps of `quaver.kernels.attention`: forward, for dQ, for dK and dV.
PRODUCTS = {"tensorwise": (3, 7, 4), "rowwise": (3, 7, 6), "blockwise": (3, 7, 6), "mxfp8": (3, 5, 4)}


def spec_of(name: str) -> AttentionSpec:
    spec = get(name, attention=True).attention
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_match_the_kernels(name: str) -> None:
    assert decoder.products(spec_of(name)) == PRODUCTS[name]
    assert kernels.ROWS[1] == kernels.FP8_ROWS[1] == decoder.KEYS
    assert kernels.COLUMNS[1] == kernels.FP8_COLUMNS_BY_ROWS[1] == decoder.QUERIES
    assert divmod(device.FP8_GEMMS, 10) == decoder.FP8_SINCE


def test_time_is_the_sum_of_products_and_quantizing() -> None:
    cost = decoder.cost(spec_of("mxfp8"), 8192, 32, 8, 128, "h200")
    card = GPUS["h200"]
    flops = 2 * 32 * 128 * (8192 * 8193 / 2)
    # q, k and v as stored, and transposed after a copy; the same for the gradient of the output.
    moved = 10 * 8192 * 128 * (32 + 8 + 8 + 32)
    assert cost.bytes == moved
    launches = 3 + 4
    expected = 12 * flops / (card.rates["bf16"].value * 1e12) + moved / (card.copy.value * 1e12) + launches * 2e-6
    assert cost.seconds == pytest.approx(expected)
    assert cost.bf16_seconds == pytest.approx(7 * flops / (card.rates["bf16"].value * 1e12) + 2 * 2e-6)
    whole = decoder.cost(spec_of("mxfp8"), 8192, 32, 8, 128, "h200", causal=False)
    assert whole.seconds == pytest.approx(2 * cost.seconds, rel=0.1)


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200"])
def test_kernels_multiply_at_the_rate_that_the_model_takes(gpu: str) -> None:
    card = GPUS[gpu]
    major, minor = card.capability
    for name in PRODUCTS:
        spec = spec_of(name)
        with launch.recording(10 * major + minor):
            scales = kernels._scales(torch.device("cpu"), (spec.input, spec.grad_output), 128)
            fp8 = scales != "block" and integers(torch.device("cpu")) != 2
        assert (decoder.kind(spec, 128, card) != "bf16") is fp8, name


def test_fp8_products_halve_the_time_until_exponentials_bound_it() -> None:
    spec = spec_of("tensorwise")
    rates = {"bf16": GpuRate(500, "measured", ""), "tensor": GpuRate(1000, "measured", "")}
    how = {"name": "one", "about": "one", "copy": GpuRate(4, "measured", ""), "rates": rates}
    fast, slow, old = (
        decoder.cost(spec, 4096, 8, 8, 128, Gpu(capability=capability, exponentials=exponentials, **how))
        for capability, exponentials in (((9, 0), None), ((9, 0), GpuRate(0.5, "measured", "")), ((8, 0), None))
    )
    assert (fast.forward, fast.backward) == pytest.approx((old.forward / 2, old.backward / 2))
    scores = 8 * 4096 * 4097 / 2
    # Two sweeps forward; Δ, the amax of dS, dQ, and dK with dV.
    assert (slow.forward, slow.backward) == pytest.approx((2 * scores / 0.5e12, 4 * scores / 0.5e12))
    assert fast.bytes == old.bytes + 2 * 4 * 8 * 4096 * 128


@pytest.mark.parametrize(
    ("sizes", "message"), [((0, 4, 2, 64), "tokens is 0"), ((8, 4, 3, 64), "4 heads are no multiple of 3 groups")]
)
def test_impossible_attention_sizes_give_a_clear_error(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.cost(spec_of("mxfp8"), *sizes, "h200")
