"""The layer around the residual stream, and a hybrid of it with attention, decoded beside a cache of keys."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.pairs import assert_same_training, kept_bytes

SIZES: dict[str, Any] = {"inner": 48, "head_dim": 8, "state": 16, "groups": 2}


def make(**options: Any) -> qt.Mamba2Layer:
    torch.manual_seed(0)
    return qt.Mamba2Layer(32, **(SIZES | options))


def by_parts(layer: Any, x: Tensor) -> Tensor:
    x = x + layer.mixer(x)
    return x if layer.mlp is None else x + layer.mlp(x)


@pytest.mark.parametrize("hidden", [None, 40])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_it_has_the_bits_of_its_parts_and_recomputes_them(recipe: str | None, hidden: int | None) -> None:
    def recomputed(layer: Any, x: Tensor) -> Tensor:
        layer.recompute = "full"
        y: Tensor = layer(x)
        return y

    layer = make(hidden=hidden)
    runs = [lambda layer, x: layer(x), by_parts, recomputed]
    assert_same_training(layer, runs, recipe, [torch.randn(2, 9, 32) for _ in range(2)])
    x = torch.randn(2, 64, 32, requires_grad=True)
    assert kept_bytes(layer, lambda: recomputed(layer, x)) <= x.numel() * 4 + 64


def test_the_stream_may_be_float32_beside_bf16() -> None:
    layer = make(dtype=torch.bfloat16, residual_in_fp32=True, residual_scale=0.5)
    x = torch.randn(2, 9, 32).bfloat16()
    y = layer(x)
    assert y.dtype is torch.float32
    assert_bitwise(y, x.float() + layer.mixer(x) * 0.5)
    assert layer(y).dtype is torch.float32
    assert "residual_in_fp32=True" in repr(layer) and "recompute" not in repr(layer)


def test_a_hybrid_decodes_token_by_token_as_in_one_forward() -> None:
    torch.manual_seed(0)
    attention = qt.TransformerLayer(32, 4, 48, groups=2, normalization="RMSNorm", rope=qt.RotaryEmbedding(8))
    layers = nn.ModuleList([make(), attention, make(hidden=40)])
    x = torch.randn(2, 11, 32)

    def run(x: Tensor, keys: Any = None, states: Any = None) -> Tensor:
        number = 0
        for layer in layers:
            if layer is attention:
                x = layer(x, cache=keys, layer=0)
            else:
                x = layer(x, cache=states, layer=number)
                number += 1
        return x

    keys, states = qt.KVCache(1, 16), qt.StateCache(2)
    with torch.no_grad(), qt.frozen(layers):
        whole = run(x)
        parts = [run(part, keys, states) for part in x.split([6, 1, 1, 1, 2], 1)]
        assert_close("outputs", torch.cat(parts, 1), whole, 1e-6)
        assert keys.length == states.length == 11
        for cache in (keys, states):
            cache.reorder(torch.tensor([1, 0]))
        token = torch.randn(2, 1, 32)
        swapped = torch.cat((x.flip(0), token), 1)
        assert_close("beams", run(token, keys, states), run(swapped)[:, -1:], 1e-6)


def test_padding_and_packing_reach_the_block() -> None:
    layer, x = make(hidden=40), torch.randn(2, 9, 32)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, :4] = True
    assert_close("padded", layer(x, mask=mask)[1, 4:], layer(x[1:, 4:])[0], 1e-6)
    y = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 9, 18]))
    assert_close("packed", y, layer(x).flatten(0, 1), 1e-6)


def test_bad_options_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match="give None or 'full'"):
        make(recompute="mlp")
    with pytest.raises(TypeError, match="Mamba2Layer has no option 'hiden'"):
        make(hiden=3)
