"""Frequencies and outputs are those of `transformers`, for every rope_type."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from quaver.torch import RotaryEmbedding
from quaver.torch.nn.attention.rope_scaling import KINDS
from tests.close import assert_close
from tests.pairs import case_name, pairs

ORIGINAL = 32
POSITIONS = 128
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "yarn attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
    "longrope attention_factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.19,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "proportional factor": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}


def config(scaling: dict[str, Any]) -> LlamaConfig:
    """Heads of 16 features; the dynamic type grows beyond the original length, the others have positions to spare."""
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=ORIGINAL if scaling["rope_type"] == "dynamic" else POSITIONS,
        rope_parameters={"rope_theta": 10_000.0} | scaling,
    )


def ours(scaling: dict[str, Any]) -> RotaryEmbedding:
    return RotaryEmbedding(16, scaling=scaling, max_positions=config(scaling).max_position_embeddings)


def test_every_type_of_transformers_is_a_row_and_every_row_is_tried() -> None:
    assert set(KINDS) == set(ROPE_INIT_FUNCTIONS) | {"default"} == {case["rope_type"] for case in CASES.values()}


@pytest.mark.parametrize(
    ("given", "length", "case"), pairs((False, True), (8, ORIGINAL + 1, 100), CASES), ids=case_name
)
def test_outputs_match_transformers(case: str, length: int, given: bool) -> None:
    theirs = LlamaRotaryEmbedding(config(CASES[case]))
    x = torch.randn(2, length, 2, 16)
    positions = torch.arange(length)[None]
    expected = apply_rotary_pos_emb(x, x, *theirs(x, positions), unsqueeze_dim=2)[0]
    got = ours(CASES[case])(x, positions=positions.expand(2, -1) if given else None)
    assert_close(case, got, expected, 1e-6)


def test_longrope_switches_for_the_longest_sequence_of_a_batch() -> None:
    scaling = CASES["longrope"]
    rope, x = ours(scaling), torch.ones(2, 4, 1, 16)
    beyond = torch.stack([torch.arange(4), torch.arange(4) + ORIGINAL])
    theirs = LlamaRotaryEmbedding(config(scaling))
    for positions in (beyond, beyond % ORIGINAL, beyond):
        expected = apply_rotary_pos_emb(x, x, *theirs(x, positions), unsqueeze_dim=2)[0]
        assert_close("positions", rope(x, positions=positions), expected, 1e-6)
    got = rope(x, offset=torch.tensor([0, ORIGINAL]))
    expected = apply_rotary_pos_emb(x, x, *theirs(x, beyond), unsqueeze_dim=2)[0]
    assert_close("offsets", got, expected, 1e-6)


YARN, LLAMA3 = CASES["yarn"], CASES["llama3"]


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "yarm"}, r"no rope_type 'yarm'; did you mean 'yarn'\?"),
        ({"rope_type": "linear"}, r"rope_type 'linear' needs the key 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, r"needs the key 'original_max_position_embeddings'"),
        ({k: v for k, v in YARN.items() if k != "factor"}, r"rope_type 'yarn' needs the key 'factor'"),
        (YARN | {"beta_fats": 3}, r"has no key 'beta_fats'; did you mean 'beta_fast'\?"),
        ({"rope_type": "default", "factor": 2.0}, r"rope_type 'default' has no key 'factor'; it takes none"),
        ({"rope_type": "linear", "factor": 0}, r"factor is 0; give the factor by which sequences become longer"),
        ({"rope_type": "linear", "factor": "2"}, r"factor is '2'; give the factor by which sequences become longer"),
        ("linear", r"scaling is 'linear'; give Hugging Face's dict"),
        ({"rope_type": "dynamic", "factor": 2.0}, r"'dynamic' stretches beyond max_positions; give it"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"high_freq_factor is 1\.0 and low_freq_factor 1\.0"),
        (CASES["longrope"] | {"short_factor": [1.0]}, r"short_factor has 1 numbers; 16 rotated features need 8"),
        ({"partial_rotary_factor": 0.3}, r"0\.3 of 10 is 3; make it an even number"),
        ({"partial_rotary_factor": 1.5}, r"fraction is 1\.5"),
        ({"rope_theta": -1.0}, r"theta is -1\.0"),
        ({"rope_theta": float("nan")}, r"theta is nan"),
        (
            {
                "rope_type": "dynamic",
                "factor": 2.0,
                "partial_rotary_factor": 0.2,
                "original_max_position_embeddings": 8,
            },
            "'dynamic' keeps one frequency .* 2 features have only one",
        ),
    ],
)
def test_missing_keys_of_a_dict_give_a_clear_error(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(16 if "partial" not in str(scaling) else 10, scaling=scaling)


@pytest.mark.parametrize("case", ["yarn", "longrope", "llama3"])
def test_the_original_length_and_the_factor_may_be_left_out(case: str) -> None:
    """The one is that of the model, the other the ratio of both."""
    left_out = "original_max_position_embeddings" if case == "llama3" else "factor"
    length = 64 if case == "llama3" else POSITIONS
    ropes = [
        RotaryEmbedding(16, scaling=CASES[case] | change, max_positions=length) for change in ({}, {left_out: None})
    ]
    x = torch.randn(1, 100, 2, 16)
    assert_close(case, ropes[1](x), ropes[0](x), 0)
