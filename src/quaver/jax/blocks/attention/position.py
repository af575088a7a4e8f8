"""Relative position biases: a learnt number a head for each bucket of distances, added to attention's scores.

Source: Raffel et al. 2019 (T5), arXiv:1910.10683, and its public code's rule for the buckets.
"""

import math

import jax.numpy as jnp
from jax import Array


def relative_position_buckets(
    queries: int, keys: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Array:
    """The bucket of each pair: near distances have one each, far ones share it on a logarithmic scale.

    Args:
        queries, keys: how many positions there are of either.
        buckets: how many in all; half of them for keys that come later, if bidirectional.
        max_distance: from here on everything is in the last bucket.
        bidirectional: False puts every later key into bucket 0.
    Returns:
        int32 [queries, keys].
    Raises:
        ValueError: too few buckets, or a distance that they all reach one by one.
    Exact.
    """
    side = buckets // 2 if bidirectional else buckets
    near = side // 2
    if near < 1 or (bidirectional and buckets % 2):
        least = 4 if bidirectional else 2
        raise ValueError(f"{buckets} buckets are too few or odd; give {least} or more, an even number if bidirectional")
    if max_distance <= near:
        raise ValueError(f"max_distance is {max_distance}; {buckets} buckets need more than {near}")
    distance = jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]  # positive where the key came before
    bucket = jnp.zeros_like(distance)
    if bidirectional:
        bucket = jnp.where(distance < 0, side, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(distance, 0)
    # The bound of each shared bucket, from integers: a logarithm would round differently from machine to machine.
    shared = side - near
    bounds = [math.ceil(near * (max_distance / near) ** (i / shared) - 1e-9) for i in range(1, shared)]
    far = near + sum((distance >= bound).astype(jnp.int32) for bound in bounds) if bounds else near
    return (bucket + jnp.where(distance < near, distance, far)).astype(jnp.int32)


def relative_position_bias(
    table: Array, queries: int, keys: int, *, max_distance: int = 128, bidirectional: bool = True
) -> Array:
    """The bias to hand to `attention`: [1, H, queries, keys] from a table [H, buckets]."""
    bucket = relative_position_buckets(
        queries, keys, buckets=table.shape[1], max_distance=max_distance, bidirectional=bidirectional
    )
    return table[:, bucket][None]
