"""A trained decoder under Hugging Face's name for it is the same function."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quaver.train.memory import hf_config, hf_family, hf_name
from quaver.train.model_config import MODELS
from quaver.train.torch.decoder import build_decoder

FAMILIES = {"tiny": "llama", "125m": "llama", "llama3.1-8b": "llama", "mistral-tiny": "mistral", "qwen3-tiny": "qwen3"}


def test_each_model_has_its_family() -> None:
    for name, config in MODELS.items():
        if name.startswith("pair"):
            continue  # tests/train/test_ranks.py names models of its own
        kind = hf_family(config)
        assert kind == FAMILIES.get(name, kind)
        others = ("falcon", "gpt-neox", "gemma2", "mixtral", "deepseek", "mamba2", "nemotron-h")
        assert bool(kind) == (not name.startswith(others))
        assert hf_name("embedding.weight", config) == ("model.embed_tokens.weight" if kind else "embedding.weight")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_match_the_hugging_face_model(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"layers": 2, "dim": 64, "heads": 4, "groups": 2, "head_dim": 16, "hidden": 96}
    config = replace(MODELS[name], **few)
    ours = build_decoder(config, 97, 0, torch.device("cpu"))
    fields = hf_config(config, 97, config.positions)
    model: Any = getattr(transformers, fields["architectures"][0])(transformers.AutoConfig.for_model(**fields))
    state = {hf_name(key, config): value for key, value in ours.state_dict().items()}
    problems = model.load_state_dict(state, strict=False)
    assert not problems.unexpected_keys and set(problems.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, got = ours(ids), model(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 1e-6
