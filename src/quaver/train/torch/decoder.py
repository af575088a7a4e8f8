"""A decoder in the manner of Llama (arXiv:2302.13971), with grouped-query attention (arXiv:2305.13245).

Plain torch: RMSNorm, rotary positions, SwiGLU. Its matrices are `nn.Linear`, which `quaver.torch.convert`
replaces afterwards; embedding and head stay as they are.
"""

import torch
import torch.nn.functional as F
from torch import nn

from quaver.train.parameters import initial, padded
from quaver.train.sizes import ModelConfig


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on x [B, H, S, D]; cos and sin are float32 [S, D / 2]."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over x [B, S, dim]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
        kv_dim = config.groups * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
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
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, cos, sin)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, vocab: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
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
    """A decoder with the initial weights of `quaver.train.sizes`."""
    with torch.device(device):
        model = Decoder(config, padded(vocab), sequence)
    with torch.no_grad():
        for name, value in initial(config, vocab, seed):
            model.get_parameter(name).copy_(torch.from_numpy(value))
    return model


def loss_of(model: nn.Module, batch: torch.Tensor, dtype: str) -> torch.Tensor:
    """Mean cross-entropy in nats a token, in float32, of batch int64 [B, S + 1]."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
