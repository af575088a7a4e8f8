"""Plain implementation of Transformer Engine's linen layer, written from its documentation, for comparison."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "squared_relu": lambda x: jax.nn.relu(x) ** 2,
}


def norm(p: dict[str, Array], x: Array, kind: str = "layernorm", centered: bool = False) -> Array:
    gamma = p["scale"] + 1 if centered else p["scale"]
    if kind == "rmsnorm":
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gamma + p["ln_bias"]


def dense(p: dict[str, Array], x: Array) -> Array:
    y = jnp.tensordot(x, p["kernel"], 1)
    return y + p["bias"] if "bias" in p else y


def mlp(p: dict[str, Array], y: Array, names: tuple[str, ...]) -> Array:
    z = jnp.tensordot(y, p["wi_kernel"], 1) + p.get("wi_bias", 0)
    product = 1.0
    for i, name in enumerate(names):
        product = product * ACTIVATIONS[name](z[..., i, :])
    return product @ p["wo_kernel"] + p.get("wo_bias", 0)


def transposed(x: Array, least: float = 1, most: float = 10000, consecutive: bool = True) -> Array:
    """Rotary positions of [batch, tokens, heads, features], as complex numbers."""
    half = x.shape[-1] // 2
    period = least * (most / least) ** (np.arange(half) / half)
    rotation = jnp.exp(1j * jnp.arange(x.shape[1])[:, None] / period)[:, None, :]
    if consecutive:
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * rotation
        return jnp.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., :half] + 1j * x[..., half:]) * rotation
    return jnp.concatenate([z.real, z.imag], -1)


def attend(q: Array, k: Array, v: Array, hidden: Any = None, bias: Any = 0, scale: float = 1.0) -> Array:
    """[batch, tokens, heads, features], keys and values of fewer heads."""
    several = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, several, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def later(queries: int, keys: int) -> Array:
    return jnp.arange(keys) > jnp.arange(queries)[:, None]


def attention(p: dict[str, Any], x: Array, memory: Array, o: dict[str, Any], hidden: Any, bias: Any) -> Any:
    heads, groups = o["heads"], o.get("num_gqa_groups", o["heads"])
    itself = x is memory
    first = p["qkv"] if "qkv" in p else p["query"]
    y = x
    if "scale" in first:
        y = norm(first, x, o.get("layernorm_type", "layernorm"), o.get("zero_centered_gamma", False))
    m = y if itself else memory
    if "qkv" in p:
        both = dense(first, y)
        parts = [both[..., i, :] for i in range(3)]
    elif "kv" in p:
        both = dense(p["kv"], m)
        parts = [dense(first, y), both[..., 0, :], both[..., 1, :]]
    else:
        parts = [dense(first, y), dense(p["key"], m), dense(p["value"], m)]
    q, k, v = (a.reshape(*a.shape[:2], n, -1) for a, n in zip(parts, (heads, groups, groups), strict=True))
    if o.get("enable_rotary_pos_emb"):
        q, k = transposed(q), transposed(k)
    scale = q.shape[-1] ** -0.5 if o.get("scale_attn_logits") else 1.0
    z = attend(q, k, v, hidden, bias, scale)
    return dense(p["out"], z.reshape(*z.shape[:2], -1)), y


def relative(table: Array, tokens: int, bidirectional: bool) -> Array:
    """T5's bias, by its rule for one distance at a time."""
    buckets = np.zeros((tokens, tokens), int)
    for i in range(tokens):
        for j in range(tokens):
            n, distance, offset = table.shape[1], i - j, 0
            if bidirectional:
                n //= 2
                offset, distance = (n, -distance) if distance < 0 else (0, distance)
            distance = max(distance, 0)
            far = n // 2
            if distance >= far:
                distance = min(far + int(np.log(distance / far) / np.log(128 / far) * (n - far)), n - 1)
            buckets[i, j] = offset + distance
    return table[:, buckets]


def layer(p: dict[str, Any], x: Array, memory: Array | None = None, **o: Any) -> Array:
    decoder = memory is not None
    post = o.get("apply_residual_connection_post_layernorm", False)
    bias = relative(p["relpos_bias"]["rel_embedding"], x.shape[1], not decoder) if "relpos_bias" in p else 0
    hidden = None if o.get("self_attn_mask_type") == "no_mask" else later(x.shape[1], x.shape[1])
    y, normed = attention(p["self_attention" if decoder else "attention"], x, x, o, hidden, bias)
    x = y + (normed if post else x)
    if memory is not None:
        y, normed = attention(p["encoder_decoder_attention"], x, memory, o, None, 0)
        x = y + (normed if post else x)
    kind = o.get("layernorm_type", "layernorm"), o.get("zero_centered_gamma", False)
    normed = norm(p["mlp"], x, *kind)
    x = mlp(p["mlp"], normed, o.get("mlp_activations", ("gelu",))) + (normed if post else x)
    return norm(p["output_layernorm"], x, *kind) if "output_layernorm" in p else x
