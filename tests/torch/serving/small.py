"""A small Llama of transformers, the same on every call, and its streams as dicts."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quaver.torch as qt
from quaver.recipes.spec import Recipe

VOCABULARY = 128


def llama(recipe: str | Recipe | None, hidden: int = 64, layers: int = 2, bias: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        attention_bias=bias,
    )
    model = LlamaForCausalLM(config)
    if recipe is not None:
        qt.convert(model, recipe)
    return model


def tokens(count: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (2, count), generator=torch.Generator().manual_seed(1))


def tensors(buckets: Any) -> dict[str, Tensor]:
    """The tensors of all buckets by name; no name twice."""
    every = [pair for bucket in buckets for pair in bucket]
    named = {name: tensor.detach().clone() for name, tensor in every}
    assert len(named) == len(every)
    return named


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], label: str = "") -> None:
    """Check that two dicts have the same names, dtypes, shapes and bytes."""
    assert one.keys() == other.keys(), f"{label}: {one.keys() ^ other.keys()}"
    for name, a in one.items():
        b = other[name]
        assert a.dtype is b.dtype and a.shape == b.shape, f"{label} {name}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        same = torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
        assert same, f"{label} {name} differs"
