"""How a Transformer layer adds its parts to the residual stream, and how it drops them."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

Part = Callable[[Array], Array]


def residual(
    x: Array,
    parts: Sequence[Part],
    norms: Sequence[Part],
    drop: Part,
    *,
    post_norm: bool = False,
    parallel: bool = False,
) -> Array:
    """Add each part's output to x, in turn or at once.

    Args:
        x: [B, S, d].
        parts: attention, cross attention, MLP: functions of [B, S, d].
        norms: one for each part; a single one if parallel.
        drop: applied to a part's output before it is added.
        post_norm: norm(x + part(x)) as in Vaswani et al. 2017; else x + part(norm(x)).
        parallel: x + sum of part(norm(x)), as in GPT-J and Falcon.
    """
    if parallel:
        h = norms[0](x)
        return x + drop(sum((part(h) for part in parts[1:]), parts[0](h)))
    for part, norm in zip(parts, norms, strict=True):
        x = norm(x + drop(part(x))) if post_norm else x + drop(part(norm(x)))
    return x


def drop_path(x: Array, rate: float, key: Array) -> Array:
    """Leave a part's output out for whole samples, and scale what stays by 1 / (1 - rate).

    Args:
        x: [B, ...].
        rate: probability of leaving a sample out.
        key: jax.random key.
    Statistical. Source: Huang et al. 2016, arXiv:1603.09382.
    """
    kept = jax.random.bernoulli(key, 1 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
