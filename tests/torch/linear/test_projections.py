"""Several layers of one input."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver.core.spec import Recipe
from quaver.torch.linear import projections
from quaver.torch.linear.layer import Linear


@pytest.mark.parametrize("recipe", [None, "bf16", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("recorded", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("tokens", [16, 512], ids=["an MLP as one function", "as two"])
def test_each_group_of_layers_asks_for_its_recipe_once(
    recipe: str | None, recorded: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its step was decided beforehand or not."""
    assert 16 * 64 <= projections.ON_HOST < 512 * 64
    block = qt.TransformerLayer(32, 4, 64, groups=2, activation="swiglu", normalization="RMSNorm", bias=False)
    asked, ask = Counter[tuple[nn.Module, ...]](), projections._shared_recipe

    def counting(layers: Any) -> Recipe | None:
        asked[tuple(layers)] += 1
        return ask(layers)

    monkeypatch.setattr(projections, "_shared_recipe", counting)
    x = torch.randn(1, tokens, 32, requires_grad=recorded)
    with torch.set_grad_enabled(recorded), nullcontext() if recipe is None else qt.autocast(recipe):
        block(x)
    layers = [layer for layer in block.modules() if isinstance(layer, Linear)]
    assert {layer for group in asked for layer in group} <= set(layers) and len(asked) >= 2
    assert set(asked.values()) == {1}
