"""Whole Transformer layers as one composes them from torch, and ours with the same weights."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.torch.nn.attention.rope import RotaryEmbedding
from quaver.torch.nn.transformer import TransformerLayer


@dataclass(frozen=True)
class Size:
    """Sizes of a layer."""

    dim: int
    heads: int
    groups: int
    hidden: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Rotary(nn.Module):
    """Turns queries and keys [B, S, H, D] by tables that were made before, as models do once for all layers."""

    def __init__(self, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)[:, None]  # [S, 1, D]
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.cos + half_turned(q) * self.sin, k * self.cos + half_turned(k) * self.sin


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attend(nn.Module):
    """Causal attention of q [B, S, H, D] on k and v [B, S, G, D], to [B, S, H D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Plain(nn.Module):
    """A layer of torch's own parts, named as ours are so that it takes the same state dict.

    Args:
        size, tokens: of the layer, and of a sequence.
        gpt: LayerNorm, gelu and biases; else RMSNorm, rope and SwiGLU, a Llama's.
        fused: one matrix for q, k and v, and one for gate and up: fewer calls, but v keeps all three alive.
        norm: made as norm(dim, eps=..., dtype=...).
    """

    def __init__(
        self, size: Size, tokens: int, *, gpt: bool, fused: bool, norm: Any, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        dim, kv, hidden = size.dim, size.groups * size.head_dim, size.hidden
        common: dict[str, Any] = {"bias": gpt, "dtype": dtype}
        self.head_dim = size.head_dim
        self.attention, self.mlp = nn.Module(), nn.Module()
        self.attention.norm = norm(dim, eps=1e-5, dtype=dtype)
        self.projections = {"q_proj": dim, "k_proj": kv, "v_proj": kv}
        self.entrance = {"up_proj": hidden} if gpt else {"gate_proj": hidden, "up_proj": hidden}
        self.fused = fused
        for part, name, widths in (
            (self.attention, "qkv_proj", self.projections),
            (self.mlp, "up_proj" if gpt else "gate_up_proj", self.entrance),
        ):
            for own, width in ({name: sum(widths.values())} if fused else widths).items():
                setattr(part, own, nn.Linear(dim, width, **common))
        self.rope = None if gpt else Rotary(tokens, size.head_dim, dtype)
        self.attend = Attend()
        self.attention.o_proj = nn.Linear(dim, dim, **common)
        self.mlp.norm = norm(dim, eps=1e-5, dtype=dtype)
        self.activation = nn.GELU("tanh") if gpt else SwiGLU()
        self.mlp.down_proj = nn.Linear(hidden, dim, **common)

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.attention, self.mlp
        h = attention.norm(x)
        if self.fused:
            projected = attention.qkv_proj(h).split(list(self.projections.values()), -1)
        else:
            projected = attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        if self.rope is not None:
            q, k = self.rope(q, k)
        x = x + attention.o_proj(self.attend(q, k, v))
        h = mlp.norm(x)
        if len(self.entrance) == 1:
            activated = self.activation(mlp.up_proj(h))
        elif self.fused:
            activated = self.activation(*mlp.gate_up_proj(h).chunk(2, -1))
        else:
            activated = self.activation(mlp.gate_proj(h), mlp.up_proj(h))
        y: Tensor = x + mlp.down_proj(activated)
        return y


def ours(plain: Plain, size: Size, **options: Any) -> TransformerLayer:
    """Return the layer as a `TransformerLayer`, fused like the plain one, whose parameters share memory with it."""
    variant: dict[str, Any] = {"activation": "gelu", "normalization": "LayerNorm"}
    if plain.rope is not None:
        rope = RotaryEmbedding(size.head_dim)
        variant = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, "rope": rope}
    layer = TransformerLayer(
        size.dim,
        size.heads,
        size.hidden,
        **{"groups": size.groups, "fused": plain.fused, "device": "meta", **variant, **options},
    )
    layer.load_state_dict(plain.state_dict(), assign=True)
    return layer
