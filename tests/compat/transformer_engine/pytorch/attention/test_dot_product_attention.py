"""Masks, layouts and biases of a call of Transformer Engine's attention, against a plain formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.compat.transformer_engine.pytorch as te
from quaver.compat.transformer_engine.common.recipe import Float8CurrentScaling
from tests.close import assert_bitwise, assert_close

B, S, H, G, D = 2, 7, 4, 2, 8


def drawn(keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, tokens first."""
    torch.manual_seed(0)
    return torch.randn(S, B, H, D), torch.randn(keys, B, G, D), torch.randn(keys, B, G, D)


def plain(q: Tensor, k: Tensor, v: Tensor, hidden: Any = None, bias: Any = 0.0, sink: Any = None) -> Tensor:
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / D**0.5 + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.einsum("bhqk,kbhd->qbhd", torch.cat((scores, column), -1).softmax(-1)[..., :-1], v).flatten(2)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(2)


def ahead(queries: int, keys: int, shift: int = 0) -> Tensor:
    return torch.arange(keys)[None] - torch.arange(queries)[:, None] - shift


def attention(**options: Any) -> Any:
    return te.DotProductAttention(H, D, G, **options)


def test_mask_types() -> None:
    q, k, v = drawn()
    core, causal = attention(), ahead(S, S) > 0
    assert_close("causal", core(q, k, v), plain(q, k, v, causal), 1e-6)
    assert_close("none", core(q, k, v, attn_mask_type="no_mask"), plain(q, k, v), 1e-6)
    assert_close("window", core(q, k, v, window_size=(2, 0)), plain(q, k, v, causal | (ahead(S, S) < -2)), 1e-6)
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., 5:] = True
    rows = ~mask[:, 0, 0].t()
    for kind, hidden in (("padding", mask), ("padding_causal", mask | causal), ("causal,padding", mask | causal)):
        got = core(q, k, v, mask, attn_mask_type=kind)
        assert_close(kind, got[rows], plain(q, k, v, hidden)[rows], 1e-6)
    ends = torch.tensor([0, S, S + 5], dtype=torch.int32)
    by_ends = core(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, attn_mask_type="padding")
    assert_close("lengths", by_ends[rows], plain(q, k, v, mask)[rows], 1e-6)
    any_ = torch.rand(B, 1, S, S) > 0.7
    any_[..., 0] = False
    assert_close("arbitrary", core(q, k, v, any_, attn_mask_type="arbitrary"), plain(q, k, v, any_), 1e-6)
    q, k, v = drawn(9)
    kind = "causal_bottom_right"
    assert_close(kind, core(q, k, v, attn_mask_type=kind), plain(q, k, v, ahead(S, 9, 2) > 0), 1e-6)
    other = torch.zeros(B, 1, 1, 9, dtype=torch.bool)
    other[0, ..., 4:] = True
    pair = core(q, k, v, (torch.zeros_like(mask), other), attn_mask_type="padding")
    assert_close("pair", pair, plain(q, k, v, other), 1e-6)


def test_layouts() -> None:
    q, k, v = drawn()
    expected = attention()(q, k, v)
    transposed = [x.transpose(0, 1) for x in (q, k, v)]
    for core, given in ((attention(), {"qkv_format": "bshd"}), (attention(qkv_format="bshd"), {})):
        assert_close("bshd", core(*transposed, **given).transpose(0, 1), expected, 1e-6)
    flat, ends = [x.flatten(0, 1) for x in transposed], torch.tensor([0, S, 2 * S], dtype=torch.int32)
    for kind in ("padding_causal", "causal"):
        y = attention(qkv_format="thd")(*flat, cu_seqlens_q=ends, cu_seqlens_kv=ends, attn_mask_type=kind)
        assert_close("thd", y.view(B, S, -1).transpose(0, 1), expected, 1e-6)


def test_biases_and_sinks() -> None:
    q, k, v = drawn()
    core, bias = attention(attn_mask_type="no_mask"), torch.randn(1, H, S, S)
    added: Any = {"core_attention_bias": bias}
    y = core(q, k, v, core_attention_bias_type="post_scale_bias", **added)
    assert_close("post", y, plain(q, k, v, bias=bias), 1e-6)
    y = core(q, k, v, core_attention_bias_type="pre_scale_bias", **added)
    assert_close("pre", y, plain(q, k, v, bias=bias / D**0.5), 1e-6)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    distance = -slopes.view(-1, 1, 1) * ahead(S, S).abs()
    y = attention()(q, k, v, core_attention_bias_type="alibi", alibi_slopes=slopes)
    assert_close("alibi", y, plain(q, k, v, ahead(S, S) > 0, distance), 1e-6)
    off = attention(attn_mask_type="no_mask", softmax_type="off-by-one")
    assert_close("off by one", off(q, k, v), plain(q, k, v, sink=torch.zeros(H)), 1e-6)
    learned = attention(attn_mask_type="no_mask", softmax_type="learnable")
    assert [n for n, _ in learned.named_parameters()] == ["softmax_offset"]
    with torch.no_grad():
        learned.softmax_offset.add_(torch.randn(H))
    y = learned(q, k, v)
    assert_close("learnable", y, plain(q, k, v, sink=learned.softmax_offset.detach()), 1e-6)
    y.sum().backward()
    assert learned.softmax_offset.grad.any()


def test_recomputed_and_quantized() -> None:
    q, k, v = (x.requires_grad_() for x in drawn())
    results = []
    for again in (False, True):
        with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
            y = attention()(q, k, v, checkpoint_core_attention=again)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)
    assert 0 < (results[0][0] - attention()(q, k, v)).norm() / results[0][0].norm() < 0.1


def test_missing_features_give_a_clear_error() -> None:
    q, k, v = drawn(9)
    for make, sentence in (
        (lambda: attention(softmax_type="vanila"), "did you mean 'vanilla'"),
        (lambda: attention(return_max_logit=True), "return_max_logit are not supported"),
        (
            lambda: attention()(q, k, v, attn_mask_type="no_mask", window_size=(2, 2)),
            "7 queries of 9 keys is not supported",
        ),
        (lambda: attention()(q, k, v, fp8_output=True), "values between layers are in high precision"),
        (lambda: attention()(q, k, v, attn_mask_type="paddin"), "did you mean 'padding'"),
        (lambda: attention()(q, k, v, core_attention_bias_type="alibbi"), "did you mean 'alibi'"),
        (
            lambda: attention(qkv_format="thd")(
                *(x[:7].flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=torch.tensor([0, 5, 10]),
                cu_seqlens_q_padded=torch.tensor([0, 7, 14]),
            ),
            "padding between packed sequences",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_scores_are_capped() -> None:
    q, k, v = drawn()
    k = 8 * k
    several = k.repeat_interleave(H // G, 2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, several) / D**0.5
    expected = plain(q, k, v, ahead(S, S) > 0, bias=2 * torch.tanh(scores / 2) - scores)
    assert_close("of the module", attention(softcap=2.0)(q, k, v), expected, 1e-5)
    assert_close("of a call", attention(softcap=9.0)(q, k, v, softcap=2.0), expected, 1e-5)
    assert_close("none", attention(softcap=2.0)(q, k, v, softcap=0.0), attention()(q, k, v), 1e-6)
    layer = te.TransformerLayer(32, 64, H, softcap=2.0, layer_type="decoder")
    assert [m.core_attention.soft_cap for m in (layer.self_attention, layer.inter_attention)] == [2.0, 2.0]
    with pytest.raises(ValueError, match="soft_cap"):
        attention(softcap=-1.0)(q, k, v)
