"""The table of models agrees with what their authors published."""

from dataclasses import fields

import pytest
from transformers import (
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from quaver.jax.blocks.layers import ACTIVATIONS as JAX_ACTIVATIONS
from quaver.torch.nn.activation import ACTIVATIONS
from quaver.train.config import TrainConfig
from quaver.train.memory import parameters
from quaver.train.model_config import KNOWN, MODELS, PLANNED, ModelConfig

#: Vocabulary, and parameters in millions, of the models with the sizes of a row.
PUBLISHED = {
    "llama3-8b": (128_256, 8030),
    "llama3-70b": (128_256, 70_554),
    "llama3.1-405b": (128_256, 405_853),
    "falcon-7b": (65_024, 6922),
    "gpt-neox-20b": (50_432, 20_555),
    "gemma2-2b": (256_000, 2614),
    "gemma2-9b": (256_000, 9242),
    "gemma2-27b": (256_000, 27_227),
    "mistral-7b": (32_000, 7242),
    "qwen3-0.6b": (151_936, 596),
    "qwen3-1.7b": (151_936, 1721),
    "qwen3-4b": (151_936, 4022),
    "qwen3-8b": (151_936, 8191),
    "mixtral-8x7b": (32_000, 46_703),
    "deepseek-v3": (129_280, 671_026),
    "mamba2-2.7b": (50_288, 2703),
    "nemotron-h-8b": (131_072, 8101),
}
#: What Hugging Face's configuration of a family is by default, where that is a published model.
DEFAULTS: dict[str, PreTrainedConfig] = {
    "gpt-neox-20b": GPTNeoXConfig(),
    "gemma2-2b": Gemma2Config(),
    "falcon-7b": FalconConfig(),
    "mistral-7b": MistralConfig(),
}
TINY = [name for name in MODELS if name.endswith("-tiny")]


def count(config: ModelConfig, vocab: int) -> int:
    total = 0
    for shape in parameters(config, vocab).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str) -> None:
    vocab, millions = PUBLISHED[name]
    assert round(count(KNOWN[name], vocab) / 1e6) == millions


@pytest.mark.parametrize("name", DEFAULTS)
def test_sizes_match_the_hugging_face_configuration(name: str) -> None:
    ours, theirs = MODELS[name], DEFAULTS[name].to_dict()
    assert (ours.layers, ours.dim, ours.heads) == tuple(
        theirs[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    assert ours.hidden == theirs.get("intermediate_size", 4 * ours.dim)
    assert ours.tied == theirs["tie_word_embeddings"]
    rope = theirs["rope_parameters"]
    assert (ours.theta, ours.fraction) == (rope["rope_theta"], rope.get("partial_rotary_factor", 1.0))
    if "sliding_window" in theirs:
        assert ours.window(0) == (theirs["sliding_window"] - 1, 0)


def test_gemma_2_alternates_local_and_global_and_caps_as_published() -> None:
    ours, theirs = MODELS["gemma2-2b"], Gemma2Config()
    assert [ours.window(i) is not None for i in range(4)] == [
        kind == "sliding_attention" for kind in theirs.layer_types[:4]
    ]
    assert (ours.soft_cap, ours.logit_cap) == (theirs.attn_logit_softcapping, theirs.final_logit_softcapping)
    assert (ours.eps, ours.head_dim, ours.positions) == (theirs.rms_norm_eps, 256, theirs.max_position_embeddings)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_family_has_hugging_faces_activation(kind: type[PreTrainedConfig]) -> None:
    assert kind().hidden_act == "silu"
    assert MODELS["tiny"].activation == MODELS["qwen3-tiny"].activation == "swiglu"


def test_every_family_is_there_tiny_and_as_published() -> None:
    families = {name.removesuffix("-tiny") for name in TINY}
    others = {"mixtral", "deepseek", "mamba2", "nemotron-h"}
    assert families == {"llama", "falcon", "gpt-neox", "gemma2", "mistral", "qwen3"} | others
    assert all(any(name.startswith(family) and name not in TINY for name in KNOWN) for family in families)
    assert MODELS["llama-tiny"] == MODELS["tiny"]


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_differs_from_the_real_one_in_sizes_alone(name: str) -> None:
    real = KNOWN[next(other for other in PUBLISHED if other.startswith(name.removesuffix("-tiny")))]
    sizes = {"layers", "dim", "heads", "groups", "head_dim", "hidden", "lr", "positions", "windows", "scale", "theta"}
    sizes |= {"vocab", "pattern", "latent", "state", "experts"}
    for field in fields(ModelConfig):
        if field.name not in sizes:
            assert getattr(MODELS[name], field.name) == getattr(real, field.name), field.name
    assert len(MODELS[name].windows) == len(real.windows)
    assert set(MODELS[name].pattern) == set(real.pattern)
    for part in ("latent", "state", "experts"):
        assert (getattr(MODELS[name], part) is None) == (getattr(real, part) is None)
    if real.experts is not None and (own := MODELS[name].experts) is not None:
        for field in ("scores", "best_of_group", "scale", "bias_rate", "balance", "by_sequence", "z"):
            assert getattr(own, field) == getattr(real.experts, field), field


#: Names of Hugging Face's configurations of families whose published model is in `PLANNED` alone.
THEIRS = {"mixtral-8x7b": MixtralConfig(), "deepseek-v3": DeepseekV3Config()}


@pytest.mark.parametrize("name", THEIRS)
def test_sizes_of_experts_match_the_hugging_face_configuration(name: str) -> None:
    ours, theirs = PLANNED[name], THEIRS[name]
    assert ours.experts is not None
    assert (ours.layers, ours.dim, ours.heads) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.num_attention_heads,
    )
    number = getattr(theirs, "n_routed_experts", None) or theirs.num_local_experts
    assert (ours.experts.number, ours.experts.chosen) == (number, theirs.num_experts_per_tok)
    if isinstance(theirs, DeepseekV3Config):
        sizes, experts = ours.latent, ours.experts
        assert sizes is not None
        assert (sizes.q_rank, sizes.kv_rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
        assert (sizes.plain_dim, sizes.rope_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
        assert (sizes.value_dim, ours.hidden) == (theirs.v_head_dim, theirs.intermediate_size)
        assert (experts.hidden, experts.scale) == (theirs.moe_intermediate_size, theirs.routed_scaling_factor)
        assert (experts.groups, experts.top_groups) == (theirs.n_group, theirs.topk_group)
        assert ours.numbers("attention") == list(range(theirs.first_k_dense_replace))


def test_nemotron_h_has_the_published_pattern() -> None:
    """hybrid_override_pattern of nvidia/Nemotron-H-8B-Base-8K's config.json."""
    written = {"state-mlp": "M-", "state": "M", "attention": "*-"}
    published = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    assert "".join(written[kind] for kind in PLANNED["nemotron-h-8b"].pattern) == published


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_row_is_possible(config: ModelConfig) -> None:
    assert config.heads % config.groups == 0 and config.head_dim % 2 == 0
    assert all(n % 32 == 0 for n in (config.dim, config.hidden, config.head_dim))
    assert config.gated == ACTIVATIONS[config.activation].gated == JAX_ACTIVATIONS[config.activation].gated


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations_are_known_by_their_names(name: str) -> None:
    assert ("glu" in name) == ACTIVATIONS[name].gated


@pytest.mark.parametrize(
    "typed, meant", [("gemma2-tny", "gemma2-tiny"), ("qwen-8b", "qwen3-8b"), ("falcon", "falcon-7b")]
)
def test_a_misspelt_model_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"model '{typed}' is not known; did you mean '{meant}'\?"):
        TrainConfig(model=typed)
