"""Signal to quantization noise of a linear layer, in decibels, against float64 on the same inputs."""

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure, Target, at_least, within
from benchmarks.subjects import peer
from quaver.recipes import RECIPES

#: Tokens, input features, output features.
SIZE, QUICK_SIZE = (512, 1024, 1024), (48, 64, 32)
SEEDS = 3
#: Whole-tensor figures of torchao's recipes, which ours of the same formats must equal.
E5M2_GRADIENTS = {"output": within(28.5, 0.2), "dgrad": within(24.6, 0.2), "wgrad": within(24.6, 0.2)}
E4M3_GRADIENTS = dict.fromkeys(E5M2_GRADIENTS, within(28.5, 0.2))
EXPECTED = {"tensorwise": E5M2_GRADIENTS, "rowwise": E4M3_GRADIENTS, "mxfp8": E4M3_GRADIENTS}
#: Recipes whose scales are finer than the tensor.
ROBUST = dict.fromkeys(("rowwise", "blockwise", "mxfp8"), at_least(27.0))

Layer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def plain(convert: Callable[[nn.Linear], nn.Module]) -> Layer:
    """Output, dgrad and wgrad of a layer made from (x, weight, grad_output)."""

    def run(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        linear.weight = nn.Parameter(w.clone())
        layer = convert(linear)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(g)
        grad_weight = next(layer.parameters()).grad
        assert leaf.grad is not None and grad_weight is not None
        return y.detach(), leaf.grad, grad_weight

    return run


def ours(recipe: str) -> Layer:
    def convert(linear: nn.Linear) -> nn.Module:
        qt.convert(linear, recipe)
        return linear

    return plain(convert)


def subjects() -> dict[str, tuple[str, Layer]]:
    """Return (recipe that determines the targets, layer) by displayed name."""
    others = {"nn.Linear": ("", plain(lambda linear: linear))}
    for name in peer.RECIPES:
        others[f"torchao {name}"] = ("", plain(partial(peer.convert, recipe=name)))
    return others | {f"quaver {name}": (name, ours(name)) for name in RECIPES if name != "bf16"}


def inputs(seed: int, size: tuple[int, int, int], spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K], w [N, K] and g [T, N] in bf16: Gaussian, the tokens of x times 10^U(-spread, spread)."""
    tokens, k, n = size
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=random)
    w = torch.randn(n, k, generator=random) * 0.02
    g = torch.randn(tokens, n, generator=random)
    scales = 10.0 ** (spread * (2 * torch.rand(tokens, 1, generator=random) - 1))
    return (x * scales).bfloat16(), w.bfloat16(), g.bfloat16()


def decibels(reference: Tensor, value: Tensor, dim: int | None = None) -> Tensor:
    """10 log10 of signal over noise, of the whole tensor or along `dim`; 200 where they are equal."""
    noise = (value.double() - reference).square().sum(dim)
    return (10 * torch.log10(reference.square().sum(dim) / noise)).clamp(max=200.0)


def whole(quick: bool) -> list[Figure]:
    size = QUICK_SIZE if quick else SIZE
    figures = []
    for subject, (recipe, layer) in subjects().items():
        seen: dict[str, list[float]] = {column: [] for column in E5M2_GRADIENTS}
        for seed in range(1 if quick else SEEDS):
            x, w, g = inputs(seed, size, 0.0)
            exact = (x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double())
            for column, reference, value in zip(seen, exact, layer(x, w, g), strict=True):
                seen[column].append(decibels(reference, value).item())
        targets: dict[str, Target] = {} if quick else EXPECTED.get(recipe, {})
        figures += [
            Figure(subject, column, statistics.fmean(values), "dB", targets.get(column))
            for column, values in seen.items()
        ]
    return figures


def worst_row(quick: bool) -> list[Figure]:
    size = QUICK_SIZE if quick else SIZE
    figures = []
    for subject, (recipe, layer) in subjects().items():
        worst, everything = math.inf, []
        for seed in range(1 if quick else SEEDS):
            x, w, g = inputs(seed, size, 3.0)
            reference = x.double() @ w.double().t()
            output = layer(x, w, g)[0]
            worst = min(worst, decibels(reference, output, 1).amin().item())
            everything.append(decibels(reference, output).item())
        target = None if quick else ROBUST.get(recipe)
        figures.append(Figure(subject, "worst row", worst, "dB", target))
        figures.append(Figure(subject, "whole output", statistics.fmean(everything), "dB"))
    return figures


WHOLE = Case(
    name="noise",
    title="Signal to quantization noise, Gaussian data",
    notes=(
        f"Tokens, input and output features {SIZE}; weights of standard deviation 0.02, bf16 inputs, float64 on the "
        f"same inputs as reference; mean of {SEEDS} seeds. The targets are what torchao's recipes reach, ± 0.2 dB."
    ),
    measure=whole,
)
WORST_ROW = Case(
    name="worst-row",
    title="Signal to quantization noise of the worst row of the output, tokens scaled by 10^-3 to 10^3",
    notes=f"As `noise`, each token times 10^U(-3, 3); the worst row of {SEEDS} seeds. No one scale serves them all.",
    measure=worst_row,
)
