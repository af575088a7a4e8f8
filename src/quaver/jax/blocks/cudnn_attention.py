"""Attention by cuDNN's flash attention, for the calls that it supports on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.blocks.attention_inputs import AttentionCall


def runs_on_gpu() -> bool:
    """Return True if the default device is a GPU."""
    config: Any = jax.config
    chosen = config.jax_default_device
    platform = jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)
    return platform in ("gpu", "cuda")


def cudnn_refusal(call: AttentionCall, mask_type: str) -> str:
    """Return why cuDNN does not compute a call, "" if it does."""
    operands, options = call.operands, call.options
    q, k, v = operands[:3]
    equal_lengths = q.shape[-2] == k.shape[-2]
    left, right = options.window
    reasons = {
        "soft_cap": options.soft_cap is not None,
        "sinks": operands.sinks is not None,
        "alibi_slopes": operands.slopes is not None,
        "dropout": bool(options.dropout),
        "chunk": options.local is not None,
        "padding or segments": call.tokens.q_segments is not None,
        "dtypes": not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16),
        "features of a head": q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 != 0 or q.shape[-1] > 128,
        "alignment": mask_type == "causal_bottom_right" and not equal_lengths,
        "window": right > 0 or (left >= 0 and (right < 0 or not equal_lengths)),
    }
    return ", ".join(name for name, is_so in reasons.items() if is_so)


def attend_cudnn(q: Array, k: Array, v: Array, call: AttentionCall) -> Array:
    """Return the output of a call that `cudnn_refusal` accepts, [B, Sq, H, D]."""
    hidden, bias = (None if x is None else _ungrouped(x) for x in (call.tokens.mask, call.operands.bias))
    if bias is not None:
        hides = bias == -jnp.inf
        hidden = hides if hidden is None else hidden | hides
        # cuDNN adds a large negative number where the mask is False.
        bias = jnp.where(hides, 0, bias).astype(q.dtype)
    left, right = call.options.window
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        None if hidden is None else ~hidden,
        scale=call.options.scale,
        is_causal=right == 0,
        local_window_size=None if left < 0 else (left, 0),
        implementation="cudnn",
    )
    # cuDNN averages all values for a query that sees no key.
    return out if hidden is None else jnp.where(hidden.all(-1).swapaxes(1, 2)[..., None], 0, out)


def _ungrouped(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])  # [b, g, r, Sq, Sk] to [b, h, Sq, Sk]
