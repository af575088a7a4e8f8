"""Test T5's buckets and biases against transformers, pair by pair, and errors."""

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import quaver.torch as qt
from quaver.torch.nn.attention.relative_bias import relative_position_buckets
from tests.close import assert_bitwise


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (4, 3)])
def test_buckets_are_t5s(buckets: int, max_distance: int, bidirectional: bool) -> None:
    before = torch.arange(-200, 201)
    theirs = T5Attention._relative_position_bucket(
        -before, bidirectional=bidirectional, num_buckets=buckets, max_distance=max_distance
    )
    assert_bitwise(relative_position_buckets(before, buckets, max_distance, bidirectional), theirs)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_bias_is_t5s_also_of_the_last_queries(decoder: bool) -> None:
    config = T5Config(
        d_model=16, d_kv=4, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=9
    )
    config.is_decoder = decoder
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = qt.RelativePositionBias(4, 8, 9, bidirectional=not decoder)
    ours.weight = theirs.relative_attention_bias.weight
    assert_bitwise(ours(5, 9), theirs.compute_bias(5, 9))
    assert_bitwise(ours(2, 9, 7), theirs.compute_bias(2, 9, past_seen_tokens=7))
    several = ours(2, 9, torch.tensor([7, 3]))
    assert_bitwise(several, torch.cat([theirs.compute_bias(2, 9, past_seen_tokens=n) for n in (7, 3)]))


def test_bad_input_gives_a_clear_error() -> None:
    for options, sentence in (
        ({"heads": 0}, "a bias needs a positive number of heads, not 0"),
        ({"heads": 4, "buckets": 7}, "give 4 or more, an even number"),
        ({"heads": 4, "buckets": 1, "bidirectional": False}, "give 2 or more"),
        ({"heads": 4, "max_distance": 8}, "32 buckets need more than 8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            qt.RelativePositionBias(**options)
    with pytest.raises(TypeError, match="did you mean 'buckets'"):
        qt.RelativePositionBias(4, bucket=8)  # type: ignore[call-arg]
