"""Test latent attention: the plain formula, layouts, masks, latent caches, fused norms, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.nn.attention import attention
from tests.close import assert_bitwise, assert_close

LATENT = qt.LatentConfig(q_rank=24, kv_rank=20, plain_dim=8, rope_dim=16, value_dim=12)


def make(latent: qt.LatentConfig = LATENT, **options: Any) -> Any:
    given: dict[str, Any] = {"rope": qt.RotaryEmbedding(latent.rope_dim), "mask_type": "causal", "bias": False}
    layer = qt.LatentAttention(64, 4, latent, **given | options)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    return layer


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain(layer: Any, x: Tensor) -> Tensor:
    """The formula of the docstring."""
    if layer.latent.q_rank is None:
        q = layer.q_proj(x)
    else:
        q = layer.q_up_proj(rms(layer.q_down_proj(x), layer.q_norm.weight))
    q = q.unflatten(-1, (4, 24))
    c, r = layer.kv_down_proj(x).split((20, 16), -1)
    kv = layer.kv_up_proj(rms(c, layer.kv_norm.weight)).unflatten(-1, (4, 20))
    q = torch.cat((q[..., :8], layer.rope(q[..., 8:].contiguous())), -1)
    k = torch.cat((kv[..., :8], layer.rope(r.unsqueeze(-2)).expand(-1, -1, 4, -1)), -1)
    y: Tensor = layer.o_proj(attention(q, k, kv[..., 8:], mask_type="causal").flatten(-2))
    return y


@pytest.mark.parametrize("q_rank", [24, None])
@pytest.mark.parametrize("interleaved", [False, True])
def test_it_is_the_plain_formula(q_rank: int | None, interleaved: bool) -> None:
    latent = qt.LatentConfig(q_rank=q_rank, kv_rank=20, plain_dim=8, rope_dim=16, value_dim=12)
    layer = make(latent, rope=qt.RotaryEmbedding(16, interleaved=interleaved))
    x = torch.randn(2, 9, 64, requires_grad=True)
    y, right = layer(x), plain(layer, x)
    assert_close("output", y, right, 1e-6)
    g = torch.randn_like(y)
    wanted = [x, *layer.parameters()]
    for ours, theirs in zip(torch.autograd.grad(y, wanted, g), torch.autograd.grad(right, wanted, g), strict=True):
        assert_close("gradient", ours, theirs, 2e-6)


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_layouts_agree(layout: str) -> None:
    layer, x = make(), torch.randn(3, 9, 64)
    expected = layer(x)
    layer.layout = layer.core.layout = layout
    if layout == "thd":
        y = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 9, 18, 27])).view(3, 9, 64)
    else:
        y = layer(x.transpose(0, 1)).transpose(0, 1)
    assert_close("output", y, expected, 1e-6)


def test_a_cache_holds_latents_and_decoding_is_one_whole_forward() -> None:
    layer, x = make(), torch.randn(2, 9, 64)
    with torch.no_grad():
        whole = layer(x)
        cache, paged = qt.KVCache(1, 9), qt.PagedKVCache(1, pages=8, page_size=4)
        for kv_cache in (cache, paged):
            steps = [layer(part, cache=kv_cache) for part in x.split([4, 1, 1, 2, 1], 1)]
            assert_close("outputs", torch.cat(steps, 1), whole, 1e-6)
        keys, values = cache._keys[0], cache._values[0]
        assert keys is not None and values is not None
        assert keys.shape == (2, 9, 1, 20) and values.shape == (2, 9, 1, 16)


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_fused_norms_have_the_bits_of_separate_norms(recipe: str) -> None:
    layer, x = make(normalization="RMSNorm"), torch.randn(2, 16, 64)
    with qt.autocast(recipe):
        y = layer(x)
        y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    for norm in (layer.norm, layer.q_norm, layer.kv_norm):
        norm.register_forward_hook(lambda *_: None)
    with qt.autocast(recipe, enabled=recipe != "delayed"), torch.no_grad():
        if recipe != "delayed":
            assert_bitwise(layer(x), y.detach())


def test_bad_input_gives_a_clear_error() -> None:
    for options, sentence in (
        ({"groups": 2}, "each head of latent attention has its own keys"),
        ({"rope": qt.RotaryEmbedding(8)}, "rope rotates 8 features, but latent.rope_dim is 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make(**options)
    with pytest.raises(ValueError, match=r"positive numbers of features, but got {'kv_rank': 0}"):
        qt.LatentConfig(kv_rank=0, plain_dim=8, rope_dim=16, value_dim=12)
    for options, sentence in (
        ({"qk_norm": "RMSNorm", "temperature": (1.0, 2)}, "latent attention has no qk_norm, temperature: leave it out"),
        ({"cross_attention": True}, "latent attention has no cross_attention"),
    ):
        with pytest.raises(ValueError, match=sentence):
            qt.TransformerLayer(64, 4, 96, latent=LATENT, **options)
    with pytest.raises(ValueError, match=r"LatentAttention\(64\) got an input of shape \(2, 63\)"):
        make()(torch.randn(2, 63))
    with pytest.raises(ValueError, match="layout 'bshd'"):
        make(layout="sbhd")(torch.randn(2, 1, 64), cache=qt.KVCache(1, 8))
