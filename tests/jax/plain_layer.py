"""A Transformer layer in numpy and float64, from the formulas: the reference for modules without a recipe."""

from typing import Any

import numpy as np

EPS = 1e-6


def norm(x: np.ndarray, p: dict[str, np.ndarray], kind: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True) if kind == "LayerNorm" else x
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * p["scale"] + p.get("bias", 0)


def dense(x: np.ndarray, p: dict[str, np.ndarray], axes: int = 1) -> np.ndarray:
    return np.tensordot(x, p["kernel"], axes) + p.get("bias", 0)


def rotated(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, bias: Any = 0.0) -> np.ndarray:
    k, v = (np.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]) + bias
    if causal:
        s = np.where(np.triu(np.ones(s.shape[-2:], bool), 1), -np.inf, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def attention(x: np.ndarray, memory: np.ndarray, p: Any, *, causal: bool, rope: bool, bias: Any = 0.0) -> np.ndarray:
    if "qkv" in p:
        fused = dense(x, p["qkv"])  # [B, S, G, H / G + 2, D]
        q, k, v = (part.reshape(*x.shape[:2], -1, fused.shape[-1]) for part in np.split(fused, [-2, -1], axis=3))
    elif "kv" in p:
        q = dense(x, p["query"])
        k, v = np.moveaxis(dense(memory, p["kv"]), 3, 0)
    else:
        q, k, v = dense(x, p["query"]), dense(memory, p["key"]), dense(memory, p["value"])
    if "query_norm" in p:
        q, k = norm(q, p["query_norm"], "RMSNorm"), norm(k, p["key_norm"], "RMSNorm")
    if rope:
        q, k = rotated(q), rotated(k)
    return dense(attend(q, k, v, causal, bias), p["out"], 2)


def mlp(x: np.ndarray, p: Any) -> np.ndarray:
    """SwiGLU if wi has pairs, else gelu by its tanh formula."""
    h = dense(x, p["wi"])
    if p["wi"]["kernel"].ndim == 3:
        h = h[..., 0] / (1 + np.exp(-h[..., 0])) * h[..., 1]
    else:
        h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return dense(h, p["wo"])


def layer(x: Any, memory: Any, p: Any, kind: str, order: str, *, causal: bool, rope: bool, bias: Any = 0.0) -> Any:
    """order: "pre", "post" or "parallel"."""
    parts = {"attention": lambda h: attention(h, h, p["attention"], causal=causal, rope=rope, bias=bias)}
    if memory is not None:
        parts["cross_attention"] = lambda h: attention(h, memory, p["cross_attention"], causal=False, rope=False)
    parts["mlp"] = lambda h: mlp(h, p["mlp"])
    if order == "parallel":
        h = norm(x, p["norm"], kind)
        return x + sum(part(h) for part in parts.values())
    for name, part in parts.items():
        of = p[f"{name}_norm"]
        x = norm(x + part(x), of, kind) if order == "post" else x + part(norm(x, of, kind))
    return x
