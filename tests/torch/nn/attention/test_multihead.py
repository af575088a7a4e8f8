"""Multi-head attention: the same as torch's, fused and separate projections, cross attention, norms of q and k."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from tests.close import assert_bitwise, assert_close


def test_equals_torchs_module() -> None:
    ours, theirs = qt.MultiheadAttention(48, 4), nn.MultiheadAttention(48, 4, batch_first=True)
    with torch.no_grad():
        ours.qkv_proj.weight.copy_(theirs.in_proj_weight)
        ours.qkv_proj.bias.copy_(theirs.in_proj_bias.normal_())
        ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 7, 48)
    assert_close("output", ours(x), theirs(x, x, x, need_weights=False)[0], 1e-6)


def separate(fused: Any) -> Any:
    """The same attention with a matrix for each projection."""
    heads, groups, (wide, narrow) = fused.core.heads, fused.core.groups, fused.core.head_dim
    dim = fused.o_proj.out_features
    unfused = qt.MultiheadAttention(dim, heads, groups=groups, head_dim=(wide, narrow), fused=False, rope=fused.rope)
    parts = fused.qkv_proj.weight.split([heads * wide, groups * wide, groups * narrow])
    biases = fused.qkv_proj.bias.split([heads * wide, groups * wide, groups * narrow])
    with torch.no_grad():
        for layer, weight, bias in zip((unfused.q_proj, unfused.k_proj, unfused.v_proj), parts, biases, strict=True):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
    unfused.o_proj.load_state_dict(fused.o_proj.state_dict())
    return unfused


# Scales for a row, or 32 of it, are the same in one matrix and in three.
@pytest.mark.parametrize("recipe", [None, "bf16", "mxfp8", "rowwise"])
@pytest.mark.parametrize(("groups", "head_dim"), [(4, 16), (2, 16), (1, (16, 8))])
def test_fused_equals_separate(recipe: str | None, groups: int, head_dim: Any) -> None:
    fused = qt.MultiheadAttention(64, 4, groups=groups, head_dim=head_dim, rope=qt.RotaryEmbedding(16))
    other, x = separate(fused), torch.randn(2, 32, 64)
    with qt.autocast(recipe, enabled=recipe is not None):
        assert_close("output", fused(x), other(x), 2e-6)


def test_cross_attention_reads_the_memory() -> None:
    for fused in (True, False):
        cross = qt.MultiheadAttention(48, 4, memory_dim=32, fused=fused)
        x, memory = torch.randn(2, 5, 48), torch.randn(2, 11, 32)
        y = cross(x, memory)
        assert y.shape == (2, 5, 48)
        assert not torch.equal(y, cross(x, memory.flip(0)))
        names = {name for name, _ in cross.named_children() if name.endswith("proj")}
        assert names == ({"q_proj", "kv_proj", "o_proj"} if fused else {"q_proj", "k_proj", "v_proj", "o_proj"})


def rotated(attention: Any, x: torch.Tensor) -> torch.Tensor:
    rotated: torch.Tensor = attention.rope(x)
    return rotated


@pytest.mark.parametrize("scope", ["head", "each_head", "all_heads"])
@pytest.mark.parametrize(("qk_norm", "after"), [("RMSNorm", False), ("LayerNorm", True)])
def test_norms_of_queries_and_keys_are_the_plain_formula(qk_norm: str, after: bool, scope: str) -> None:
    options: dict[str, Any] = {"qk_norm": qk_norm, "qk_norm_scope": scope, "qk_norm_after_rope": after, "eps": 1e-3}
    attention: Any = qt.MultiheadAttention(64, 4, groups=2, fused=False, rope=qt.RotaryEmbedding(16), **options)
    for norm in (attention.q_norm, attention.k_norm):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)

    def plain(x: torch.Tensor, norm: Any) -> torch.Tensor:
        whole = x.flatten(-2) if scope == "all_heads" else x
        centred = whole - whole.mean(-1, keepdim=True) if qk_norm == "LayerNorm" else whole
        y = centred * (centred.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.weight
        return (y if getattr(norm, "bias", None) is None else y + norm.bias).reshape(x.shape)

    x = torch.randn(2, 9, 64)
    q, k = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, 16)) for n in "qk")
    parts = [(q, attention.q_norm), (k, attention.k_norm)]
    q, k = (plain(rotated(attention, y), norm) if after else rotated(attention, plain(y, norm)) for y, norm in parts)
    y = attention.o_proj(attention.core(q, k, attention.v_proj(x).unflatten(-1, (-1, 16))).flatten(-2))
    assert_close("output", attention(x), y, 1e-6)
    shape = {"head": (16,), "each_head": (4, 16), "all_heads": (64,)}[scope]
    assert attention.q_norm.weight.shape == shape and attention.k_norm.weight.shape[-1] == min(shape[-1], 32)
    assert {n for n, _ in attention.q_norm.named_parameters()} == (
        {"weight"} if qk_norm == "RMSNorm" else {"weight", "bias"}
    )


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norm_of_each_head_rounds_once(kind: str) -> None:
    attention = qt.MultiheadAttention(64, 4, qk_norm=kind, qk_norm_scope="each_head", zero_centered=True)
    norm: Any = attention.q_norm
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 9, 4, 16).bfloat16()
    assert_bitwise(norm(x), norm(x.float()).bfloat16())
    of_zeros = norm(x * 0)
    expected = torch.zeros_like(of_zeros) if norm.bias is None else norm.bias.bfloat16().expand_as(of_zeros)
    assert torch.isnan(norm(x * torch.nan)).all() and torch.equal(of_zeros, expected)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_temperature_multiplies_queries_by_their_position(layout: str) -> None:
    options: dict[str, Any] = {"groups": 2, "mask_type": "causal", "fused": False}
    attention: Any = qt.MultiheadAttention(64, 4, temperature=(0.5, 2), **options)
    plain: Any = qt.MultiheadAttention(64, 4, **options)
    plain.load_state_dict(attention.state_dict())
    x = torch.randn(3, 9, 64)
    q, k, v = (getattr(plain, f"{n}_proj")(x).unflatten(-1, (-1, 16)) for n in "qkv")
    factor = torch.tensor([1 + 0.5 * math.log(1 + (p + 1) // 2) for p in range(9)])
    expected = plain.o_proj(plain.core(q * factor[:, None, None], k, v).flatten(-2))
    attention.layout = attention.core.layout = layout
    if layout == "thd":
        y = attention(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 9, 18, 27])).view(3, 9, 64)
    else:
        y = attention(x.transpose(0, 1)).transpose(0, 1) if layout == "sbhd" else attention(x)
    assert_close("output", y, expected, 1e-6)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_a_position_bias_is_added_to_a_given_bias(layout: str) -> None:
    own, given = qt.RelativePositionBias(4, 8, 6), torch.randn(2, 4, 9, 9)
    attention = qt.MultiheadAttention(64, 4, position_bias=own, layout=layout)
    plain = qt.MultiheadAttention(64, 4, layout=layout)
    plain.load_state_dict(attention.state_dict(), strict=False)
    x = torch.randn(2, 9, 64) if layout == "bshd" else torch.randn(9, 2, 64)
    assert_close("alone", attention(x), plain(x, bias=own(9, 9)), 1e-6)
    assert_close("both", attention(x, bias=given), plain(x, bias=own(9, 9) + given), 1e-6)
    attention(x).square().sum().backward()
    assert own.weight.grad is not None and own.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_only_v_of_a_fused_projection_is_saved(recipe: str) -> None:
    from tests.torch.nn.pairs import kept_bytes

    tokens, dim = 256, 64
    attention = qt.MultiheadAttention(
        dim, 4, groups=1, rope=qt.RotaryEmbedding(16), mask_type="causal", dtype=torch.bfloat16
    )
    x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)

    def run() -> torch.Tensor:
        with qt.autocast(recipe):
            return attention(x)

    run()
    numbers = tokens * dim
    qkv_and_out, codes = 2 * (2 * numbers + 2 * numbers // 4), 2 * numbers * 33 / 32 + 8
    tables, logsumexp = 2 * 4 * tokens * 16, 4 * tokens * 4
    assert kept_bytes(attention, run) <= qkv_and_out + codes + tables + logsumexp


def test_bad_input_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="do not divide by 5 heads"):
        qt.MultiheadAttention(64, 5)
    with pytest.raises(ValueError, match=r"head_dim is \(8,\); give a number, or"):
        qt.MultiheadAttention(64, 4, head_dim=(8,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot share 3 heads"):
        qt.MultiheadAttention(64, 4, groups=3)
    with pytest.raises(ValueError, match="rope rotates heads of 8 features, but these have 16"):
        qt.MultiheadAttention(64, 4, rope=qt.RotaryEmbedding(8))
    for options, sentence in (
        ({"qk_norm": "RMSNorm", "qk_norm_scope": "heads"}, "no qk_norm_scope 'heads'"),
        ({"qk_norm_scope": "all_heads"}, "without a norm: give qk_norm"),
        ({"qk_norm": "L2", "qk_norm_scope": "each_head"}, "has no gamma, so it cannot have one per head"),
        ({"key_bias": False}, "requires separate matrices: fused=False"),
        ({"temperature": (0.1, 0)}, "give .gain, length., a length in tokens above 0"),
        ({"temperature": 0.1}, "give .gain, length."),
        ({"position_bias": qt.RelativePositionBias(2)}, "position_bias is of 2 heads, this attention has 4"),
        ({"position_bias": qt.RelativePositionBias(4), "layout": "thd"}, "layout 'bshd' or 'sbhd', and no memory"),
        ({"chunk": 0}, "give a number of positions above 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            qt.MultiheadAttention(64, 4, **options)
    with pytest.raises(ValueError, match="needs a memory"):
        qt.MultiheadAttention(64, 4, memory_dim=32)(torch.randn(1, 2, 64))
    with pytest.raises(ValueError, match="give no memory"):
        qt.MultiheadAttention(64, 4)(torch.randn(1, 2, 64), torch.randn(1, 2, 64))
    with pytest.raises(ValueError, match="with 64 features"):
        qt.MultiheadAttention(64, 4)(torch.randn(1, 2, 63))
    with pytest.raises(ValueError, match="the memory has shape"):
        qt.MultiheadAttention(64, 4, memory_dim=32)(torch.randn(1, 2, 64), torch.randn(1, 2, 31))
    with pytest.raises(ValueError, match=r"is \[batch, tokens, features\]"):
        qt.MultiheadAttention(64, 4)(torch.randn(2, 64))
    with pytest.raises(ValueError, match="layout 'bshd'"):
        cache = qt.KVCache(1, 8)
        qt.MultiheadAttention(64, 4, layout="sbhd")(torch.randn(2, 1, 64), cache=cache)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": torch.zeros(6, 6, dtype=torch.bool)},
        {"bias": torch.zeros(5, 5)},
        {"cu_seqlens": torch.tensor([0, 5])},
    ],
)
def test_invalid_arguments_are_refused_before_any_work(wrong: dict[str, Any]) -> None:
    attention = qt.MultiheadAttention(64, 4, mask_type="causal")
    with qt.autocast("delayed"), pytest.raises(ValueError):
        attention(torch.randn(2, 6, 64), **wrong)
    assert not dict(attention.named_buffers())
