"""T5's buckets of distances against its formula in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from quaver.jax.blocks.attention import relative_position_bias, relative_position_buckets


def bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """distance: query minus key."""
    base = 0
    if bidirectional:
        buckets //= 2
        base = buckets * (distance < 0)
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    near = buckets // 2
    if distance < near:
        return base + distance
    share = math.log(distance / near) / math.log(max_distance / near) * (buckets - near)
    return base + min(near + int(share + 1e-9), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (4, 3)])
def test_buckets_are_t5s(buckets: int, max_distance: int, bidirectional: bool) -> None:
    got = relative_position_buckets(150, 140, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
    for q in (0, 1, 77, 149):
        assert got[q].tolist() == [bucket(q - k, buckets, max_distance, bidirectional) for k in range(140)]


def test_the_bias_is_the_tables_entry() -> None:
    table = jnp.asarray(np.random.randn(3, 8), jnp.float32)
    bias = relative_position_bias(table, 5, 7, max_distance=16)
    assert bias.shape == (1, 3, 5, 7)
    assert bias[0, 2, 4, 1] == table[2, bucket(3, 8, 16, True)]


def test_too_few_buckets_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match="3 buckets are too few or odd; give 4 or more"):
        relative_position_buckets(2, 2, buckets=3)
    with pytest.raises(ValueError, match="max_distance is 8; 32 buckets need more than 8"):
        relative_position_buckets(2, 2, buckets=32, max_distance=8)
