"""A backward in two parts, as torch's zero-bubble schedules run it: the gradients of a whole one, each made once."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.parallel.pipeline import split_backwards
from tests.close import assert_bitwise
from tests.torch.parallel.flops import Flops

WIDTH, TOKENS, SEQUENCES = 64, 16, 2
QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
#: Marks tests of a split backward's second part.
needs_edges = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 refuses edges of an autograd.Function in a backward in two parts"
)


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = qt.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.tanh(self.layer(x)))
        return y


class Beside(nn.Module):
    """A layer with a parameter as input, one with the stage's input, and a weight made by another module."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.of_prompt, self.layer = qt.Linear(WIDTH, WIDTH), qt.Linear(WIDTH, WIDTH)
        self.normed = torch.nn.utils.parametrizations.weight_norm(qt.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.normed(self.layer(x) * torch.tanh(self.of_prompt(self.prompt)))
        return y


class Again(nn.Module):
    """A block that is recomputed in backward."""

    def __init__(self, block: nn.Module, run: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.block, self.run, self.options = block, run, options

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self.block, x, **self.options)
        return y


class Experts(nn.Module):
    """Two layers, each for half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        half = SEQUENCES * TOKENS // 2
        offsets = torch.tensor([half, 2 * half], dtype=torch.int32)
        self.count += 1
        y = qt.grouped_matmul(x.flatten(0, 1), self.weight, offsets, recipe="nvfp4", count=self.count)
        return torch.tanh(y).view_as(x) * 1


def mlp(**options: Any) -> nn.Module:
    return qt.LayerNormMLP(WIDTH, 2 * WIDTH, **options)


def layer(**options: Any) -> nn.Module:
    return qt.TransformerLayer(WIDTH, 2, 2 * WIDTH, **options)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Sequential(qt.Linear(WIDTH, 2 * WIDTH), nn.GELU(), qt.Linear(2 * WIDTH, WIDTH, bias=False)),
    "Norm": lambda: nn.Sequential(qt.RMSNorm(WIDTH), qt.Linear(WIDTH, WIDTH), qt.LayerNorm(WIDTH)),
    "torch's": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), qt.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "LayerNormLinear": lambda: qt.LayerNormLinear(WIDTH, WIDTH),
    "LayerNormMLP": mlp,
    "gated": lambda: mlp(activation="swiglu", bias=False, eight_bit_activations=True),
    "gate by itself": lambda: mlp(activation="swiglu", fused=False),
    "attention": lambda: qt.MultiheadAttention(WIDTH, 2, mask_type="causal", normalization="RMSNorm"),
    "q, k, v by themselves": lambda: qt.MultiheadAttention(WIDTH, 2, fused=False, sinks="learnable"),
    "TransformerLayer": lambda: layer(sinks="learnable"),
    "unfused": lambda: layer(fused=False, activation="swiglu", normalization="RMSNorm", norm_position="sandwich"),
    "recompute": lambda: layer(recompute="full"),
    "recompute of the MLP": lambda: layer(recompute="mlp", parallel="two_norms"),
    "checkpoint": lambda: nn.Sequential(Again(mlp(), checkpoint, use_reentrant=False), qt.Linear(WIDTH, WIDTH)),
    "called twice": Twice,
    "beside": Beside,
    "experts": Experts,
    "frozen": lambda: nn.Sequential(qt.Linear(WIDTH, WIDTH).requires_grad_(False), qt.Linear(WIDTH, WIDTH)),
}


def built(name: str, recipe: str | Recipe) -> nn.Module:
    torch.manual_seed(0)
    block = BLOCKS[name]()
    # Noise depends on layer names.
    for path, part in block.named_modules():
        if isinstance(part, qt.Linear):
            part.qualified_name = path
            part.recipe = recipes.get(recipe)
    return block


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = count, 2, SEQUENCES, TOKENS, WIDTH
    return [(x.clone(), g.clone()) for x, g in torch.randn(shape, generator=generator)]


def whole(block: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    y: Tensor = block(x)
    y.backward(g)
    return y


def split_and_unsplit(block: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    with split_backwards([x]):
        y: Tensor = block(x)
    y.backward(g)
    return y


def first_part(block: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """The output, and what torch holds for the second part of a backward."""
    with split_backwards([x]):
        y: Tensor = block(x)
    value = y.detach().clone()
    _, groups = stage_backward_input([y], [g], [x], block.parameters())
    return value, groups


def in_two_parts(block: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    y, groups = first_part(block, x, g)
    stage_backward_weight(block.parameters(), groups)
    return y


def trained(way: Callable[..., Tensor], name: str, recipe: str | Recipe) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Run micro-batches of two steps; return outputs, all gradients, state and FLOPs."""
    block, values = built(name, recipe), []
    flops = Flops()
    # Factors and counts change in the second step.
    for counting in (flops, nullcontext()):
        with qt.autocast(recipe), counting:
            for x, g in batches():
                x = x.requires_grad_()
                values += [way(block, x, g), x.grad]
    gradients = {f"gradient of {key}": p.grad for key, p in block.named_parameters() if p.grad is not None}
    return values, block.state_dict() | gradients, flops.total


def compare(way: Callable[..., Tensor], name: str, recipe: str | Recipe) -> None:
    (values, state, flops), (others, other_state, other_flops) = (trained(w, name, recipe) for w in (whole, way))
    for i, (value, other) in enumerate(zip(values, others, strict=True)):
        assert_bitwise(other, value, f"value {i}")
    assert list(state) == list(other_state)
    for key, value in state.items():
        assert_bitwise(other_state[key], value, key)
    assert other_flops == flops, f"{other_flops / flops} of the FLOPs"


@needs_edges
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_two_parts_equal_a_whole_backward(name: str, recipe: str | Recipe) -> None:
    compare(in_two_parts, name, recipe)


@needs_edges
@pytest.mark.parametrize("recipe", QUANTIZING)
def test_the_two_parts_equal_a_whole_backward_under_every_recipe(recipe: str | Recipe) -> None:
    compare(in_two_parts, "LayerNormMLP", recipe)


@needs_edges
def test_two_parts_are_a_whole_backward_of_attention_in_eight_bits() -> None:
    compare(in_two_parts, "TransformerLayer", recipes.mxfp8(attention=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_split_graph_that_is_not_cut_is_a_whole_one(name: str) -> None:
    compare(split_and_unsplit, name, "delayed")


def test_a_second_part_without_a_first_says_what_comes_first() -> None:
    block = qt.Linear(WIDTH, WIDTH, recipe="mxfp8")
    ((x, _),) = batches(1)
    with split_backwards([x.requires_grad_()]):
        y = block(x)
    (joint,) = [node for node, _ in y.grad_fn.next_functions if type(node).__name__ == "_JointBackward"]
    with pytest.raises(RuntimeError, match="let a schedule run both parts"):
        torch.autograd.grad([GradientEdge(joint, 0)], block.weight, torch.empty(0))


def test_without_gradients_and_without_an_input_that_needs_one_nothing_is_split() -> None:
    block = built("LayerNormMLP", "mxfp8")
    ((x, _),) = batches(1)
    with split_backwards([x]):
        assert type(block(x).grad_fn).__name__ == "LinearFunctionBackward"
    with torch.no_grad(), split_backwards([x.requires_grad_()]):
        assert block(x).grad_fn is None
    with split_backwards([x]), torch.no_grad():
        assert block(x).grad_fn is None
    copied = copy.deepcopy(block)
    with split_backwards([x]):
        assert type(copied(x).grad_fn).__name__ == "_StageInputsBackward"
