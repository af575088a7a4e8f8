"""Small models of four kinds, and faults to plant into a random layer of each: for tests of what finds faults.

A model is built by `model_of`, and trained on the tokens of `tokens_of` with the loss of `loss_of`. Each `plant_`
function changes one layer, chosen by a seed, and returns its name.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.linear.grouped.operands import RowInputOp
from quaver.train.model_config import MODELS, StateSizes
from quaver.train.torch.decoder import build_decoder

VOCABULARY = 96
#: Sequences and tokens of a batch.
BATCH, TOKENS = 4, 32
LAYERS = 3

# ---- models ----


def _decoder(name: str, **sizes: Any) -> nn.Module:
    config = replace(MODELS[name], layers=LAYERS, dim=64, heads=2, groups=1, head_dim=32, hidden=96, **sizes)
    return build_decoder(config, VOCABULARY, 0, torch.device("cpu"))


def _mixtral() -> nn.Module:
    experts = MODELS["mixtral-tiny"].experts
    assert experts is not None
    return _decoder("mixtral-tiny", experts=replace(experts, number=4, hidden=96))


def _huggingface() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


#: Functions that build a model in high precision, with random weights.
MODEL_KINDS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _decoder("llama-tiny"),
    "mixtral": _mixtral,
    "mamba2": lambda: _decoder("mamba2-tiny", state=StateSizes(heads=16, head_dim=8, state=32, groups=1)),
    "huggingface": _huggingface,
}


def model_of(kind: str, recipe: Any) -> nn.Module:
    """Return a converted model with random weights; Mamba-2's and Hugging Face's heads are tied to the embedding."""
    model = MODEL_KINDS[kind]()
    qt.convert(model, recipe, skip=["head"] if kind in ("llama", "mixtral") else [])
    return model


def tokens_of(step: int) -> Tensor:
    """Return the token ids of a step, int64 [BATCH, TOKENS + 1]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of token ids [B, S + 1]."""
    y = model(tokens[:, :-1])
    logits = y if isinstance(y, Tensor) else y.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: nn.Module, steps: Sequence[int], after: Callable[[], None] = lambda: None) -> list[float]:
    """Train by plain SGD on the tokens of these steps, call `after` at the end of each, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after()
    return losses


# ---- faults ----


def layers_of(model: nn.Module, *patterns: str) -> list[str]:
    """Return the names of quantized layers, in the order of their blocks."""
    names = [name for name, module in model.named_modules() if isinstance(module, (qt.Linear, qt.GroupedLinear))]
    return [name for name in names if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def plant_large_channel(model: nn.Module, seed: int, factor: float = 1e6) -> tuple[str, int]:
    """Multiply one input channel of a down_proj (of Mamba-2: an out_proj), and set its weight column to 0 for good.

    Returns:
        (name of the layer, index of the channel).
    """
    choose = random.Random(seed)
    name = choose.choice(layers_of(model, "*.down_proj", "*.mixer.out_proj"))
    layer: Any = model.get_submodule(name)
    weight: Tensor = layer.weight
    channel = choose.randrange(weight.shape[-1])
    factors = torch.ones(weight.shape[-1])
    factors[channel] = factor
    with torch.no_grad():
        weight[..., channel] = 0

    def keep_zero(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[..., channel] = 0
        return gradient

    weight.register_hook(keep_zero)
    if isinstance(layer, qt.GroupedLinear):
        # Experts call no hooks: their activation is part of the same autograd function.
        experts: Any = model.get_submodule(name.rpartition(".")[0])
        experts._activations = _ScaledRows(experts._activations, factors)
    else:
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factors,))
    return name, channel


def plant_large_gate(model: nn.Module, seed: int, factor: float = 30.0) -> tuple[str, str]:
    """Multiply the gate's weights of an MLP: these, and the input of its down_proj, are then beyond a stale history.

    Returns:
        Names of the gate's layer and of the down_proj.
    """
    name = random.Random(seed).choice(layers_of(model, "*.down_proj"))
    block = name.rpartition(".")[0]
    (gate,) = layers_of(model, f"{block}.gate_proj", f"{block}.gate_up_proj")
    weight = model.get_parameter(f"{gate}.weight")
    with torch.no_grad():
        # Of experts [experts, 2 hidden, dim], the gate first.
        (weight if weight.dim() == 2 else weight[:, : weight.shape[1] // 2]).mul_(factor)
    return gate, name


def plant_large_gradient(model: nn.Module, seed: int, factor: float = 1e7) -> tuple[str, int]:
    """Multiply one row of the grad_output of a layer that is not of experts.

    Returns:
        (name of the layer, index of the row).
    """
    choose = random.Random(seed)
    names = [name for name in layers_of(model) if isinstance(model.get_submodule(name), qt.Linear)]
    name, row = choose.choice(names), choose.randrange(BATCH * TOKENS)

    def grow(_: nn.Module, grads: Sequence[Tensor]) -> tuple[Tensor]:
        g = grads[0].clone()
        g.view(-1, g.shape[-1])[row] *= factor
        return (g,)

    model.get_submodule(name).register_full_backward_pre_hook(grow)
    return name, row


def plant_idle_expert(model: nn.Module, seed: int, tokens: int = 3) -> str:
    """Route only this many tokens to expert 0 of one mixture, and divide all others evenly.

    Returns:
        Name of the mixture's experts.
    """
    name = random.Random(seed).choice([name for name, m in model.named_modules() if name.endswith(".experts")])
    router = model.get_submodule(name.rpartition(".")[0] + ".router")
    experts = model.get_submodule(f"{name}.down_proj").groups

    def reroute(_: nn.Module, __: Any, routing: Any) -> Any:
        first = torch.arange(len(routing.indices))
        indices = torch.stack([1 + (first + choice) % (experts - 1) for choice in range(routing.indices.shape[1])], 1)
        indices[:tokens, 0] = 0
        return routing._replace(indices=indices)

    router.register_forward_hook(reroute)
    return name


class _ScaledRows(RowInputOp):
    """Rows of another operation, times a factor for each channel."""

    def __init__(self, rows: RowInputOp, factors: Tensor) -> None:
        self.rows, self.factors = rows, factors

    @property
    def recomputes_input(self) -> bool:
        return self.rows.recomputes_input

    def forward(self, *x: Tensor | None, spec: Any) -> tuple[Tensor, Sequence[Any]]:
        y, saved = self.rows.forward(*x, spec=None)
        assert isinstance(y, Tensor)
        return y * self.factors, saved

    def recompute_input(self, saved: Sequence[Any], spec: Any) -> Tensor:
        y = self.rows.recompute_input(saved, None)
        assert isinstance(y, Tensor)
        return y * self.factors

    def backward(self, g: Tensor, saved: Sequence[Any], needs: Sequence[Any]) -> tuple[Tensor | None, ...]:
        return self.rows.backward(g * self.factors, saved, needs)
