"""Plain implementation of Transformer Engine's layer, written from its documentation, for comparison."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, centered: bool) -> Tensor:
    gamma = weight + 1 if centered else weight
    if kind == "RMSNorm":
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gamma
    return F.layer_norm(x, x.shape[-1:], gamma, bias, 1e-5)


def linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Linear projection with a weight that may be split over several parameters."""
    weights = [v for k, v in p.items() if k.startswith(name) and k.endswith("weight") and "layer_norm" not in k]
    biases = [v for k, v in p.items() if k.startswith(name) and k.endswith("bias") and "layer_norm" not in k]
    return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[s, b, h, d], keys and values of fewer heads, to [s, b, h d]."""
    several = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(several, 2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(2)


def length(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def self_attention(
    p: dict[str, Tensor], x: Tensor, heads: int, groups: int, o: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and the norm's output, of parameters by their names."""
    if "layernorm_qkv.layer_norm_weight" in p:
        at = "layernorm_qkv."
        own = p[at + "layer_norm_weight"], p.get(at + "layer_norm_bias")
        x = norm(x, o.get("normalization", "LayerNorm"), *own, o.get("zero_centered_gamma", False))
        mixed = linear(p, at, x)
    else:
        mixed = linear(p, "qkv.", x)
    d = mixed.shape[-1] // (heads + 2 * groups)
    if o.get("fuse_qkv_params") and o.get("qkv_weight_interleaved", True):
        parts = mixed.view(*mixed.shape[:2], groups, heads // groups + 2, d)
        q, k, v = parts[..., :-2, :].reshape(*mixed.shape[:2], heads, d), parts[..., -2, :], parts[..., -1, :]
    else:
        q, k, v = (t.view(*t.shape[:2], -1, d) for t in mixed.split((heads * d, groups * d, groups * d), -1))
    if o.get("qk_norm_type") == "L2Normalization":
        q, k = length(q), length(k)
    y = attend(q, k, v, o.get("self_attn_mask_type", "causal") == "causal")
    return linear(p, "proj.", y), x


def cross_attention(
    p: dict[str, Tensor], x: Tensor, memory: Tensor, heads: int, o: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    at = "layernorm_query."
    x = norm(x, "LayerNorm", p[at + "layer_norm_weight"], p[at + "layer_norm_bias"], False)
    q, kv = linear(p, at, x), linear(p, "key_value.", memory)
    d = q.shape[-1] // heads
    if o.get("fuse_qkv_params"):
        k, v = kv.view(*kv.shape[:2], heads, 2 * d).chunk(2, -1)
    else:
        k, v = (t.view(*t.shape[:2], heads, d) for t in kv.chunk(2, -1))
    return linear(p, "proj.", attend(q.view(*q.shape[:2], heads, d), k, v, False)), x


ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATED = {"swiglu": F.silu, "geglu": ACTIVATIONS["gelu"], "reglu": F.relu, "glu": torch.sigmoid}


def mlp(p: dict[str, Tensor], x: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    own = p["layer_norm_weight"], p.get("layer_norm_bias")
    x = norm(x, o.get("normalization", "LayerNorm"), *own, o.get("zero_centered_gamma", False))
    y, activation = F.linear(x, p["fc1_weight"], p.get("fc1_bias")), o.get("activation", "gelu")
    if activation in GATED:
        gate, value = y.chunk(2, -1)
        y = GATED[activation](gate) * value
    else:
        y = ACTIVATIONS[activation](y)
    return F.linear(y, p["fc2_weight"], p.get("fc2_bias")), x


def layer(state: dict[str, Tensor], x: Tensor, heads: int, memory: Tensor | None = None, **o: Any) -> Tensor:
    """A whole layer of tokens first, without dropout."""

    def of(part: str) -> dict[str, Tensor]:
        return {k.removeprefix(part + "."): v for k, v in state.items() if k.startswith(part + ".")}

    post, last = o.get("apply_residual_connection_post_layernorm"), o.get("output_layernorm")
    y, normalized = self_attention(of("self_attention"), x, heads, o.get("num_gqa_groups", heads), o)
    if o.get("parallel_attention_mlp"):
        return x + y + mlp(of("layernorm_mlp"), x, o)[0]
    x = y + (normalized if post and not last else x)
    if memory is not None:
        y, normalized = cross_attention(of("inter_attention"), x, memory, heads, o)
        x = y + (normalized if post else x)
    y, normalized = mlp(of("layernorm_mlp"), x, o)
    x = y + (normalized if post else x)
    return (
        norm(x, o.get("normalization", "LayerNorm"), state["layernorm.weight"], state.get("layernorm.bias"), False)
        if last
        else x
    )
