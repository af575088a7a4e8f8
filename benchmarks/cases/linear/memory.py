"""Bytes of activations that autograd keeps between forward and backward, against the same layers in bf16.

Every tensor saved for backward is seen by `torch.autograd.graph.saved_tensors_hooks`, also those of a compiled graph;
each storage counts once, parameters do not count. A compiled graph may also keep the weights that it quantized, as an
eager layer keeps them in its cache: they are no activations and have a column of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.cases.linear.speed import QUANTIZING
from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.measuring.memory import bytes_of, saved_for_backward
from benchmarks.subjects import peer
from quaver.costs.ledger import saved_bytes
from quaver.recipes import RECIPES
from quaver.recipes.spec import Recipe

#: Tokens and features of every layer.
SIZE, QUICK_SIZE = (2048, 1024), (256, 128)
#: Maximum share of bf16's bytes in %: without scales, and with scales for some recipes.
WITHOUT_SCALES, WITH_SCALES = at_most(52.0), dict.fromkeys(("nvfp4", "mxfp4"), at_most(30.0))
#: Recipes whose backward reads the input in eight or four bits.
SAVING = [name for name in QUANTIZING if RECIPES[name]().wgrad.b is not None]

Build = Callable[[int], nn.Module]


def layer(features: int) -> nn.Module:
    return nn.Linear(features, features, bias=False, dtype=torch.bfloat16)


def mlp(features: int) -> nn.Module:
    return nn.Sequential(*(layer(features) for _ in range(3)))


def mlp_with_silu(features: int) -> nn.Module:
    return nn.Sequential(layer(features), nn.SiLU(), layer(features), nn.SiLU(), layer(features))


@dataclass(frozen=True)
class Saved:
    """Bytes that one forward saves."""

    activations: int
    #: Quantized weights, in eight or four bits.
    weights: int


def saved(model: nn.Module, tokens: int, features: int, compiled: bool) -> Saved:
    parameters = list(model.parameters())
    torch.manual_seed(0)
    x = torch.randn(tokens, features, dtype=torch.bfloat16, requires_grad=True)
    if compiled:
        torch.compiler.reset()
        model = torch.compile(model, fullgraph=True)  # type: ignore[assignment]
        model(x).sum().backward()
    with saved_for_backward(parameters) as tensors:
        y = model(x)
    y.sum().backward()
    weights = bytes_of(tensor for tensor in tensors.values() if is_weight(tensor, features))
    return Saved(bytes_of(tensors.values()) - weights, weights)


def is_weight(tensor: Tensor, features: int) -> bool:
    """True for the codes of a quantized weight; an input is larger, because there are more tokens than features."""
    elements = features * features
    return tensor.itemsize == 1 and tensor.numel() == (elements // 2 if tensor.dtype == torch.uint8 else elements)


def measure(build: Build, layers: int, quick: bool, compiled: bool = False, judged: bool = True) -> list[Figure]:
    tokens, features = QUICK_SIZE if quick else SIZE
    base = saved(build(features), tokens, features, compiled)
    figures = row("nn.Linear", base, base, 0)
    brief = quick and compiled  # compiling takes seconds a model
    for name in () if brief else peer.RECIPES:
        result = saved(peer.convert(build(features), name), tokens, features, compiled)
        figures += row(f"torchao {name}", result, base, 0)
    for name in ["tensorwise"] if brief else SAVING:
        recipe = RECIPES[name]()
        model = build(features)
        qt.convert(model, recipe)
        result = saved(model, tokens, features, compiled)
        scales = layers * scale_bytes(recipe, tokens, features)
        figures += row(f"quaver {name}", result, base, scales, name if judged else "")
    return figures


def scale_bytes(recipe: Recipe, tokens: int, features: int) -> int:
    """Return the bytes of the scales of one saved input."""
    assert recipe.wgrad.b is not None
    data = features * recipe.wgrad.b.padded(tokens) * recipe.wgrad.b.format.stored_bits // 8
    return saved_bytes(recipe, tokens, features) - data


def row(subject: str, result: Saved, base: Saved, scales: int, judged: str = "") -> list[Figure]:
    """Return a subject's figures; activations that are neither codes nor scales count as data."""
    without: Target | None = WITHOUT_SCALES if judged else None

    def percent(column: str, part: int, target: Target | None = None) -> Figure:
        return Figure(subject, column, 100 * part / base.activations, "%", target)

    return [
        Figure(subject, "saved", result.activations / 2**20, "MiB"),
        percent("of bf16 without scales", result.activations - scales, without),
        percent("scales", scales),
        percent("of bf16 in all", result.activations, WITH_SCALES.get(judged)),
        percent("quantized weights", result.weights),
    ]


NOTES = (
    f"Input [{SIZE[0]}, {SIZE[1]}] bf16, layers {SIZE[1]} → {SIZE[1]} without bias; each storage saved for backward "
    "counts once, parameters apart. Scales are those of the eight- or four-bit input; anything else that is saved "
    "counts as data, but for quantized weights, which the last column shows and the others leave out."
)

LAYER = Case(
    name="memory-layer",
    title="Activation bytes saved for backward: one linear layer, eager",
    notes=NOTES,
    measure=lambda quick: measure(layer, 1, quick),
)
EAGER_MLP = Case(
    name="memory-mlp",
    title="Activation bytes saved for backward: three linear layers, eager",
    notes=NOTES,
    measure=lambda quick: measure(mlp, 3, quick),
)
COMPILED_MLP = Case(
    name="memory-mlp-compiled",
    title="Activation bytes saved for backward: three linear layers, torch.compile(fullgraph=True)",
    notes=NOTES,
    measure=lambda quick: measure(mlp, 3, quick, compiled=True),
)
SILU_MLP = Case(
    name="memory-mlp-silu",
    title="Activation bytes saved for backward: three linear layers with SiLU between, eager",
    notes=NOTES + " SiLU keeps its own input in bf16, whatever the layers do: no target.",
    measure=lambda quick: measure(mlp_with_silu, 3, quick, judged=False),
)
