"""Key/value cache of one attention layer, with buffers of fixed size, so that one program serves all steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

#: Mask type of cached attention: the last query is aligned with the last token, and later slots count as padding.
MASK_TYPE = "padding_causal_bottom_right"


class AttentionCache(NamedTuple):
    """Keys and values [B, length of the buffer, G, D], and the number of cached tokens, int32 []."""

    keys: Array
    values: Array
    length: Array


def init_cache(batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike = jnp.float32) -> AttentionCache:
    """Return an empty cache for sequences of up to `length` tokens.

    Raises:
        ValueError: numbers that are not positive.
    """
    if min(batch, length, groups, head_dim) < 1:
        raise ValueError(f"a cache needs positive sizes, not {(batch, length, groups, head_dim)}")
    empty = jnp.zeros((batch, length, groups, head_dim), dtype)
    return AttentionCache(empty, empty, jnp.int32(0))


def append(cache: AttentionCache, k: Array, v: Array) -> tuple[AttentionCache, tuple[Array, Array]]:
    """Append keys and values [B, S, G, D] and return the new cache with the padding mask of its attention.

    Returns:
        (cache, mask): call `attention(q, cache.keys, cache.values, mask_type=MASK_TYPE, mask=mask)`.
    Raises:
        ValueError: shapes that do not fit, or a buffer that is too short; outside jit also one that is full.

    Inside jit, where the number of tokens is unknown, an overflow writes NaN: this and all later outputs are NaN.
    Exact: keys and values are cast to the cache's dtype.
    """
    tokens, capacity = k.shape[1], cache.keys.shape[1]
    for name, x, buffer in (("keys", k, cache.keys), ("values", v, cache.values)):
        if (x.shape[0], *x.shape[2:]) != (buffer.shape[0], *buffer.shape[2:]):
            raise ValueError(f"the {name} have shape {x.shape}, and the cache {buffer.shape}; make another cache")
    cached = None if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
    if tokens + (cached or 0) > capacity:
        raise ValueError(
            f"the cache has {capacity} slots, which {cached or 0} cached and {tokens} new tokens exceed; make it longer"
        )
    length = cache.length + tokens
    overflows = length > capacity

    def write(buffer: Array, x: Array) -> Array:
        x = jnp.where(overflows, jnp.nan, x).astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, x, cache.length, axis=1)

    new = AttentionCache(write(cache.keys, k), write(cache.values, v), length)
    of_keys = jnp.broadcast_to(jnp.arange(capacity) >= length, (k.shape[0], capacity))
    return new, (jnp.zeros(k.shape[:2], bool), of_keys)


def check_cached(layer: Any, **unsupported: Any) -> None:
    """Raise ValueError unless a layer's attention is causal and its call has none of the unsupported arguments."""
    if layer.mask_type not in ("causal", "causal_bottom_right"):
        raise ValueError(f"a cache needs causal attention, and the layer has mask_type {layer.mask_type!r}")
    given = [name for name, value in {**unsupported, "context_axis": layer.context_axis}.items() if value is not None]
    if given:
        raise ValueError(f"attention with a cache takes no {' or '.join(given)}; leave it out")
