"""A decoder in the manner of Llama (arXiv:2302.13971), with grouped-query attention (arXiv:2305.13245).

Plain torch: RMSNorm, rotary positions, SwiGLU. Its matrices are `nn.Linear`, which `quaver.torch.convert`
replaces afterwards; embedding and head stay as they are.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder; every feature size is a multiple of 32, the block of MXFP8."""

    # Number of blocks of attention and MLP.
    layers: int
    # Width of the residual stream.
    dim: int
    # Heads of the queries; a head is dim // heads wide.
    heads: int
    # Heads of keys and values, each shared by heads // kv_heads query heads.
    kv_heads: int
    # Width of the MLP.
    hidden: int
    # Learning rate that suits the size.
    lr: float
    # The head is the embedding's matrix.
    tied: bool = False
    # Base of the rotary frequencies.
    theta: float = 10_000.0


MODELS = {
    "nano": ModelConfig(layers=1, dim=64, heads=2, kv_heads=1, hidden=128, lr=5e-3),
    "tiny": ModelConfig(layers=4, dim=128, heads=4, kv_heads=2, hidden=384, lr=2e-3),
    "small": ModelConfig(layers=6, dim=256, heads=8, kv_heads=4, hidden=768, lr=2e-3),
    "125m": ModelConfig(layers=12, dim=768, heads=12, kv_heads=4, hidden=2048, lr=6e-4, tied=True),
    "350m": ModelConfig(layers=24, dim=1024, heads=16, kv_heads=8, hidden=2816, lr=3e-4, tied=True),
    "1b": ModelConfig(layers=16, dim=2048, heads=32, kv_heads=8, hidden=8192, lr=3e-4, tied=True, theta=5e5),
    "3b": ModelConfig(layers=28, dim=3072, heads=24, kv_heads=8, hidden=8192, lr=3e-4, tied=True, theta=5e5),
    "8b": ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336, lr=3e-4, theta=5e5),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x [B, H, S, D]; cos and sin are float32 [S, D / 2]."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over x [B, S, dim]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        kv_dim = config.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, S, D]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = None if config.tied else nn.Linear(config.dim, vocab, bias=False)
        half = config.dim // config.heads // 2
        frequency = config.theta ** -(torch.arange(half, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency)  # [S, D / 2]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)


def build(config: ModelConfig, vocab: int, sequence: int, seed: int, device: torch.device) -> Decoder:
    """A decoder with initial weights that depend on nothing but the sizes and the seed.

    Matrices are normal with variance 1 / dim; what writes to the residual stream is sqrt(2 layers) smaller, and an
    embedding that is not the head as well has variance 1: the stream then begins as large as the norms make it, and
    what a quantized layer adds to it, error included, is small beside it.
    """
    with torch.device(device):
        model = Decoder(config, math.ceil(vocab / 32) * 32, sequence)
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                values = random.standard_normal(tuple(parameter.shape), np.float32)
                parameter.copy_(torch.from_numpy(values * np.float32(deviation(name, config))))
    return model


def deviation(name: str, config: ModelConfig) -> float:
    """The standard deviation of a matrix's first values."""
    if name == "embedding.weight" and not config.tied:
        return 1.0
    std = config.dim**-0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.layers)
    return std


def loss_of(model: nn.Module, batch: torch.Tensor, dtype: str) -> torch.Tensor:
    """Mean cross-entropy in nats a token, in float32, of batch int64 [B, S + 1]."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
