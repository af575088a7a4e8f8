"""Layers of Hugging Face's transformers with random weights, and ours: outputs and every gradient are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from tests.close import assert_close
from tests.torch.conversion.hf_layers import DIM, LAYERS, Layer

BATCH, TOKENS = 2, 9
RELATIVE = 1e-5
#: How many tokens at the end, or at the beginning, of each sample are padding.
PADDED = (0, 4)
MASKS = ("causal", "right padding", "left padding", "arbitrary")


def padding(mask: str) -> Tensor | None:
    """bool [B, S], True where padded."""
    at, count = torch.arange(TOKENS), torch.tensor(PADDED)[:, None]
    return {"right padding": at >= TOKENS - count, "left padding": at < count}.get(mask)


def arbitrary() -> Tensor:
    """bool [B, 1, S, S], True where hidden; each query sees itself."""
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.5
    return hidden & ~torch.eye(TOKENS, dtype=torch.bool)


def additive(layer: Layer, x: Tensor, mask: str, hidden: Tensor) -> Tensor:
    """What their layer adds to the scores, made by their own functions."""
    if mask == "arbitrary":
        return torch.where(hidden, torch.finfo(x.dtype).min, 0.0)
    padded = padding(mask)
    create_mask = create_causal_mask if layer.window is None else create_sliding_window_causal_mask
    create_mask = create_mask if layer.chunk is None else create_chunked_causal_mask
    theirs: Tensor = create_mask(
        config=layer.config,
        inputs_embeds=x,
        attention_mask=None if padded is None else (~padded).long(),
        past_key_values=None,
    )
    return theirs


def random_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def run(module: nn.Module, x: Tensor, g: Tensor, **options: Any) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter."""
    leaf = x.clone().requires_grad_()
    y = module(leaf, **options)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(g)
    assert leaf.grad is not None
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all(v is not None for v in gradients.values()), gradients
    return {"output": y.detach(), "gradient of x": leaf.grad, **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_match_transformers(name: str, mask: str) -> None:
    layer = LAYERS[name]
    x, g, hidden, padded = torch.randn(BATCH, TOKENS, DIM), torch.randn(BATCH, TOKENS, DIM), arbitrary(), padding(mask)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    if mask == "left padding":
        positions = (positions - torch.tensor(PADDED)[:, None]).clamp(min=0)
    real = torch.ones(BATCH, TOKENS, 1) if padded is None else (~padded)[..., None].float()

    theirs = layer.layer(layer.config, 0)
    random_parameters(theirs)
    theirs_options = {"attention_mask": additive(layer, x, mask, hidden), "position_ids": positions}
    theirs_options["position_embeddings"] = layer.rotary(layer.config)(x, positions)
    if name.startswith("falcon"):
        theirs_options["alibi"] = None

    kind = {"causal": "causal", "arbitrary": "arbitrary"}.get(mask, "padding_causal")
    ours = layer.build(kind)
    ours.load_state_dict(layer.mapped(dict(theirs.named_parameters())), strict=True)
    ours_options: dict[str, Any] = {"mask": hidden if mask == "arbitrary" else padded}
    # Llama 4's temperature counts padding too.
    if mask == "left padding" and "temperature" not in layer.options:
        ours_options["positions"] = positions

    expected, got = run(theirs, x, g * real, **theirs_options), run(ours, x, g * real, **ours_options)
    # What a padded query sees is nobody's business: theirs averages, ours gives 0.
    assert_close("output", got.pop("output") * real, expected.pop("output") * real, RELATIVE)
    assert_close("gradient of x", got.pop("gradient of x"), expected.pop("gradient of x"), RELATIVE)
    expected = layer.mapped(expected)
    assert expected.keys() == got.keys()
    for parameter, gradient in got.items():
        assert_close(f"gradient of {parameter}", gradient, expected[parameter], RELATIVE)
