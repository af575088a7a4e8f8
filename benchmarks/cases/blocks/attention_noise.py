"""Relative error of quantized attention and of its gradients, against float64 attention of the same inputs."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measuring.figure import Case, Figure
from quaver.recipes import RECIPES, get
from quaver.recipes.spec import AttentionSpec
from quaver.torch.nn.attention.fp8 import attention_fp8
from quaver.torch.nn.attention.inputs import AttentionCall

#: Batch, query heads, groups, tokens, features of a head.
SIZE, QUICK_SIZE = (2, 8, 2, 512, 64), (1, 2, 1, 48, 16)
SEEDS = 3
COLUMNS = ("output", "dq", "dk", "dv")
#: Features of q, k, v and the output's gradient that are larger, and how much.
OUTLIERS, TIMES = 2, 20.0

#: Standard normal q, k, v and gradient, and what draws the rest, to those that are measured.
Distribution = Callable[..., tuple[Tensor, ...]]


def subjects() -> dict[str, AttentionSpec | None]:
    """Return attention specs by displayed name; None means attention without a recipe."""
    plain: dict[str, AttentionSpec | None] = {"torch in bf16": None}
    return plain | {f"quaver {name}": get(name, attention=True).attention for name in RECIPES if name != "bf16"}


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, random: torch.Generator) -> tuple[Tensor, ...]:
    return q, k, v, g


def outliers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, random: torch.Generator) -> tuple[Tensor, ...]:
    """Multiply some features of each head by `TIMES`; rescale q and k to unit variance to keep the scores."""
    dim = q.shape[-1]
    for x in (q, k, v, g):
        for head in range(x.shape[1]):
            x[:, head, :, torch.randperm(dim, generator=random)[:OUTLIERS]] *= TIMES
    growth = (1 + OUTLIERS / dim * (TIMES**2 - 1)) ** 0.5
    return q / growth, k / growth, v, g


def shifted(q: Tensor, k: Tensor, v: Tensor, g: Tensor, random: torch.Generator) -> tuple[Tensor, ...]:
    """Return inputs whose values and gradients have a mean larger than their differences between tokens."""
    return q, k, 1 + 0.3 * v, 1 + 0.3 * g


def inputs(seed: int, size: tuple[int, int, int, int, int], distribution: Distribution) -> tuple[list[Tensor], Tensor]:
    """Return q, k and v, and the gradient of the output, in bf16."""
    batch, heads, groups, tokens, dim = size
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(batch, h, tokens, dim, generator=random) for h in (heads, groups, groups, heads)]
    q, k, v, g = (x.bfloat16() for x in distribution(*drawn, random))
    return [q, k, v], g


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | None) -> Tensor:
    """Return causal attention."""
    if spec is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention_fp8(q, k, v, AttentionCall("causal", scale=q.shape[3] ** -0.5), spec)


def passes(arrays: list[Tensor], grad: Tensor, spec: AttentionSpec | None) -> list[Tensor]:
    """Return the output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    out = attend(leaves[0], leaves[1], leaves[2], spec)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def relative(value: Tensor, exact: Tensor) -> float:
    """‖value - exact‖ / ‖exact‖ in percent."""
    return 100 * ((value.double() - exact).norm() / exact.norm()).item()


def errors(quick: bool, distribution: Distribution) -> list[Figure]:
    size = QUICK_SIZE if quick else SIZE
    # Several recipes quantize attention in the same way.
    specs = subjects()
    seen: dict[AttentionSpec | None, list[list[float]]] = {spec: [[] for _ in COLUMNS] for spec in specs.values()}
    for seed in range(1 if quick else SEEDS):
        arrays, grad = inputs(seed, size, distribution)
        exact = passes([x.double() for x in arrays], grad.double(), None)
        for spec, columns in seen.items():
            for values, value, truth in zip(columns, passes(arrays, grad, spec), exact, strict=True):
                values.append(relative(value, truth))
    return [
        Figure(subject, column, statistics.fmean(values), "%")
        for subject, spec in specs.items()
        for column, values in zip(COLUMNS, seen[spec], strict=True)
    ]


_HOW = (
    f"Causal, [batch, heads, groups, tokens, features] = {list(SIZE)}, in bf16; relative RMS error against float64 "
    f"attention of the same inputs, mean of {SEEDS} seeds. The recipes are those with attention=True; torch is its "
    "scaled_dot_product_attention in bf16."
)
GAUSSIAN = Case(
    name="attention-noise",
    title="Error of quantized attention, Gaussian inputs",
    notes=f"{_HOW} q, k, v and the gradient of the output are standard normal.",
    measure=lambda quick: errors(quick, plain),
)
OUTLYING = Case(
    name="attention-outliers",
    title=f"Error of quantized attention, {OUTLIERS} features of each head {TIMES:g} times larger",
    notes=(
        f"{_HOW} As `attention-noise`, with {OUTLIERS} features of each head of q, k, v and the gradient, drawn at "
        f"random and not the same in q and k, times {TIMES:g}; q and k are then scaled back to unit variance."
    ),
    measure=lambda quick: errors(quick, outliers),
)
SHIFTED = Case(
    name="attention-shifted",
    title="Error of quantized attention, values and gradients with a mean",
    notes=(
        f"{_HOW} As `attention-noise`, with v and the gradient 1 + 0.3 times standard normal. The scores' gradient is "
        "the difference of nearly equal numbers then, and keeps the errors of both."
    ),
    measure=lambda quick: errors(quick, shifted),
)
