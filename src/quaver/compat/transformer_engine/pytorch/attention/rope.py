"""Transformer Engine's rotary embeddings: angles of positions, and functions that apply them."""

from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.nn.attention.rope import apply_rotary, positions_of


class RotaryPositionEmbedding(nn.Module):
    """Computes the angles of positions, float32 [positions, 1, 1, features]."""

    def __init__(
        self, dim: int, rotary_percent: float = 1.0, seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None, rotary_base: float = 10000.0, interleaved: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        turning = int(dim * rotary_percent)
        pairs = torch.arange(0, turning, 2, dtype=torch.float32, device="cpu") / turning
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.register_buffer("inv_freq", (1.0 / rotary_base**pairs).to(device))
        self.factor, self.longest = seq_len_interpolation_factor, pretrained_max_position_embeddings
        self.interleaved = interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        frequencies: Any = self.inv_freq
        where = torch.arange(max_seq_len, dtype=torch.float32, device=frequencies.device) + offset
        if self.longest is not None and self.factor is not None:
            where = where / max(max_seq_len / self.longest, self.factor)
        angles = torch.outer(where, frequencies)
        both = torch.stack((angles, angles), -1).flatten(-2) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None]


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """Apply rotary embeddings to queries or keys [s, b, h, d], [b, s, h, d] or [t, h, d] from angles [positions, 1, 1,
    features].

    Raises:
        ValueError: context parallelism, or packed sequences without `cu_seqlens`.
    """
    if cp_size > 1:
        raise ValueError("cp_size is not supported: use quaver.torch.parallel.context_parallel(model, mesh)")
    angles = freqs.float()[:, 0, 0]
    first = torch.arange(angles.shape[-1], device=t.device)
    first = first % 2 == 0 if interleaved else first < angles.shape[-1] // 2
    start, ends = 0 if start_positions is None else start_positions, cu_seqlens if tensor_format == "thd" else None
    token_angles = angles[positions_of(t, tensor_format, None, start, ends)].unsqueeze(-2)
    return apply_rotary(t, token_angles.cos(), torch.where(first, -1.0, 1.0) * token_angles.sin(), interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, *args: Any, qkv_split_arg_list: list[int], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed heads [..., groups, features] into q, k and v, and apply rotary embeddings to q and k.

    Args:
        qkv_split_arg_list: features of q (of several heads), k and v.
    """
    q, k, v = qkv.split(qkv_split_arg_list, -1)
    q = q.reshape(*q.shape[:-2], -1, k.shape[-1])
    q, k = (apply_rotary_pos_emb(x, f, *args, **options) for x, f in ((q, q_freqs), (k, k_freqs)))
    return q, k, v.contiguous()
