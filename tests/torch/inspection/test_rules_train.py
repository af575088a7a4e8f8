"""The rules of `qt.what_if` make a model with a planted fault train as in bf16; without them it does not."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from tests.torch.inspection import planted

BATCH, TOKENS, STEPS = 8, 64, 200


def batches(seed: int, steps: int) -> Iterator[Tensor]:
    """Yield token ids [BATCH, TOKENS + 1] of a module's source text."""
    source = Path(argparse.__file__).read_bytes()
    text = torch.tensor([byte - 32 if 32 <= byte < 128 else 0 for byte in source])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()])


def make_model(seed: int) -> nn.Module:
    model = planted.MODEL_KINDS["llama"]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.01 * torch.randn(p.shape, generator=generator))
    planted.plant_large_channel(model, 1)
    return model


def train(model: nn.Module, seed: int, steps: int = STEPS) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for tokens in batches(seed, steps):
        loss = planted.loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.slow
def test_rules_of_what_if_train_as_bf16() -> None:
    model = make_model(0)
    for _ in train(model, 0, 30):
        pass
    (batch,) = batches(9, 1)
    rules = qt.what_if(model, batch, planted.loss_of, ["tensorwise"], gpu="b200", widen=64).rules
    assert None in rules.values()
    compared = qt.compare(make_model, train, {"plain": "tensorwise", "rules": rules})
    difference = {row["recipe"]: row["difference"] for row in compared.rows}
    assert difference["plain"] > 0.05
    assert abs(difference["rules"]) <= 0.01
