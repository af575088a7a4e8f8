"""Angles and turning as Transformer Engine documents them, in every layout."""

import pytest
import torch
from torch import Tensor

from quaver.compat.transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)
from tests.close import assert_bitwise, assert_close


def plain(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """t [..., h, d] by angles [..., turning] of each token."""
    n = angles.shape[-1]
    head, rest = t[..., :n], t[..., n:]
    if interleaved:
        half = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    else:
        half = torch.cat((-head[..., n // 2 :], head[..., : n // 2]), -1)
    return torch.cat((head * angles.cos().unsqueeze(-2) + half * angles.sin().unsqueeze(-2), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_angles_and_turning(interleaved: bool, percent: float) -> None:
    rope = RotaryPositionEmbedding(16, percent, rotary_base=100.0, interleaved=interleaved)
    freqs = rope(12, offset=1)
    n = int(16 * percent)
    one = torch.outer(torch.arange(1.0, 13), 100.0 ** (-torch.arange(0, n, 2) / n))
    both = one.repeat_interleave(2, 1) if interleaved else torch.cat((one, one), 1)
    assert freqs.shape == (12, 1, 1, n)
    assert_close("angles", freqs[:, 0, 0], both, 1e-6)
    t = torch.randn(7, 2, 3, 16)
    expected = plain(t, both[:7, None].expand(7, 2, n), interleaved)
    options = {"interleaved": interleaved}
    assert_close("sbhd", apply_rotary_pos_emb(t, freqs, **options), expected, 1e-6)  # type: ignore[arg-type]
    transposed = apply_rotary_pos_emb(t.transpose(0, 1), freqs, "bshd", fused=True, **options)  # type: ignore[arg-type]
    assert_bitwise(transposed.transpose(0, 1), apply_rotary_pos_emb(t, freqs, **options))  # type: ignore[arg-type]
    flat, ends = t.transpose(0, 1).flatten(0, 1), torch.tensor([0, 7, 14])
    ragged = apply_rotary_pos_emb(flat, freqs, "thd", cu_seqlens=ends, **options)  # type: ignore[arg-type]
    assert_bitwise(ragged.view(2, 7, 3, 16), transposed)
    start = torch.tensor([0, 4])
    moved = plain(t, torch.stack((both[:7], both[4:11]), 1), interleaved)
    assert_close("start", apply_rotary_pos_emb(t, freqs, start_positions=start, **options), moved, 1e-6)  # type: ignore[arg-type]
    later = apply_rotary_pos_emb(flat, freqs, "thd", start, cu_seqlens=ends, **options)  # type: ignore[arg-type]
    assert_close("start, thd", later.view(2, 7, 3, 16).transpose(0, 1), moved, 1e-6)


def test_positions_are_interpolated() -> None:
    rope = RotaryPositionEmbedding(4, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8)
    assert_close("fixed", rope(16)[:, 0, 0, 0], torch.arange(16.0) / 2, 1e-6)
    assert_close("dynamic", rope(32)[:, 0, 0, 0], torch.arange(32.0) / 4, 1e-6)


def test_packed_heads_are_split_and_rotated() -> None:
    freqs, qkv = RotaryPositionEmbedding(8)(5), torch.randn(5, 2, 3, 32)
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, qkv_split_arg_list=[16, 8, 8])
    heads = qkv[..., :16].reshape(5, 2, 6, 8)
    assert_bitwise(q, apply_rotary_pos_emb(heads, freqs))
    assert_bitwise(k, apply_rotary_pos_emb(qkv[..., 16:24], freqs))
    assert_bitwise(v, qkv[..., 24:])


def test_missing_features_give_a_clear_error() -> None:
    freqs, t = RotaryPositionEmbedding(8)(5), torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="needs cu_seqlens"):
        apply_rotary_pos_emb(t, freqs, "thd")
    with pytest.raises(ValueError, match="cp_size is not supported"):
        apply_rotary_pos_emb(t, freqs, "thd", cp_size=2)
