"""Hugging Face models converted in place, and the files that `qt.export` writes of them."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import quaver.torch as qt
from tests.golden.cases.linear import fill
from tests.golden.inputs import values
from tests.golden.record import Record
from tests.golden.rows import rows

SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0},
}
#: One family for each way in which blocks are recognized: gated MLP, joined projections, parallel layers, norms of
#: heads, experts, mixers, learned positions.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", SMALL),
    "cohere": ("CohereConfig", "CohereForCausalLM", SMALL),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SMALL | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SMALL | {"head_dim": 16}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}),
}
RECIPES = ("delayed", "tensorwise", "mxfp8", "nvfp4")
#: Formats of exported files, and a recipe of each.
FORMATS = (("compressed-tensors", "rowwise"), ("compressed-tensors", "nvfp4"), ("deepseek", "blockwise"))


def cases() -> dict[str, Callable[[Record], None]]:
    found: dict[str, Callable[[Record], None]] = {}
    for recipe, family, blocks in rows(RECIPES, FAMILIES, (False, True)):
        found[f"{family}, {recipe}{', blocks' * blocks}"] = partial(train, family, recipe, blocks)
    for name, recipe in FORMATS:
        found[f"export {name}, {recipe}"] = partial(export, name, recipe)
    return found


def model_of(family: str) -> Any:
    config, model, sizes = FAMILIES[family]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    fill(made)
    return made.train()


def train(family: str, recipe: str, blocks: bool, record: Record) -> None:
    """Two steps of SGD."""
    model = model_of(family)
    report = qt.convert(model, recipe, blocks=blocks)
    record.sum(report=str(report))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    for step in range(2):
        tokens = torch.from_numpy(abs(values(2, 12, seed=step)) * 2**9).long() % 128
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if step == 0:
            record.sum(**{f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        record.sum(**{f"loss{step}": loss})
    record.keys(model.state_dict())


def export(name: str, recipe: str, record: Record) -> None:
    model = model_of("llama").bfloat16().eval()
    qt.convert(model, recipe)
    with tempfile.TemporaryDirectory() as folder:
        qt.export(model, Path(folder) / "out", format=name)
        for path in sorted((Path(folder) / "out").iterdir()):
            (record.exact if path.suffix == ".safetensors" else record.sum)(**{path.name: path.read_bytes()})
