"""Attention's products are counted as its kernels take them, and its price follows from them."""

import pytest

from quaver.costs import decoder
from quaver.costs.hardware import GPUS
from quaver.recipes import get
from quaver.recipes.spec import AttentionSpec
from quaver.torch.backends.gpu import attention as kernels

#: Written down by hand from the sweeps of `quaver.kernels.attention`: forward, for dQ, for dK and dV.
PRODUCTS = {"tensorwise": (3, 7, 4), "rowwise": (3, 7, 6), "blockwise": (3, 7, 6), "mxfp8": (3, 5, 4)}


def spec_of(name: str) -> AttentionSpec:
    spec = get(name, attention=True).attention
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_match_the_kernels(name: str) -> None:
    assert decoder.products(spec_of(name)) == PRODUCTS[name]
    assert (kernels.ROWS[1], kernels.COLUMNS[1]) == (decoder.KEYS, decoder.QUERIES)


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


@pytest.mark.parametrize(
    ("sizes", "message"), [((0, 4, 2, 64), "tokens is 0"), ((8, 4, 3, 64), "4 heads are no multiple of 3 groups")]
)
def test_impossible_attention_sizes_give_a_clear_error(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.cost(spec_of("mxfp8"), *sizes, "h200")
