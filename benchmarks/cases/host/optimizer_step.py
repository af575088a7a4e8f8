"""Time of AdamW steps with low-bit states on a CPU, compared with torch's fused, torch's default and torchao's."""

from typing import Any

import torch
from torch import nn

import quaver.torch as qt
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, Target, at_most
from benchmarks.measuring.timing import Step, interleave
from benchmarks.subjects import peer
from quaver.recipes import get, mxfp8
from quaver.torch import optim

#: Features of each matrix, and number of matrices: ten million parameters.
FEATURES, LAYERS = 1024, 10
#: Measured presets, with a recipe if weights are codes.
OURS = (
    ("float32", ""),
    ("exact", ""),
    ("balanced", ""),
    ("balanced", "tensorwise"),
    ("lean", "tensorwise"),
    ("lean", "mxfp8 of 32 by 32"),
)
RECIPES = {"tensorwise": get("tensorwise"), "mxfp8 of 32 by 32": mxfp8(weight_2d=True)}
#: Maximum of the time over torch's fused AdamW.
HIGHEST = 8.0


def measure(quick: bool) -> list[Figure]:
    """Return the ratios, with targets unless quick."""
    features, layers = (128, 2) if quick else (FEATURES, LAYERS)
    subjects: dict[str, Step] = {}
    for name, options in (("torch fused", {"fused": True}), ("torch default", {})):
        subjects[name] = torch_step(torch.optim.AdamW(parameters(features, layers), **options))
    for preset, recipe in OURS:
        name = f"quaver {preset}" + f", {recipe}" * bool(recipe)
        subjects[name] = our_step(features, layers, preset, recipe)
        subjects[f"{name}, compiled"] = our_step(features, layers, preset, recipe, compile=True)
    missing = ""
    try:
        with peer.silence():
            from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError as why:
        missing = f"torchao is not measured: {why}"
    else:
        for peers in () if quick else (AdamWFp8, AdamW8bit):
            subjects[f"torchao {peers.__name__}"] = torch_step(peers(parameters(features, layers)))
    with peer.silence():
        times = interleave(subjects, rounds=1 if quick else 3, steps=1)
    default = times["torch default"].ratio
    figures = []
    for name, timing in times.items():
        judged: Target | None = at_most(HIGHEST) if name.endswith("compiled") and not quick else None
        figures.append(Figure(name, "ratio", timing.ratio, "x", judged))
        figures.append(Figure(name, "over torch's default", timing.ratio / default, "x"))
        figures.append(Figure(name, "time", timing.seconds * 1e3, "ms"))
    if missing:
        raise NotMeasurable(missing, figures)
    return figures


def parameters(features: int, layers: int) -> list[nn.Parameter]:
    """Return float32 matrices with gradients."""
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(features, features, generator=draw) / features**0.5) for _ in range(layers)]
    for p in weights:
        p.grad = torch.randn(p.shape, generator=draw) * 1e-3
    return weights


def torch_step(optimizer: Any) -> Step:
    """Return a step with the same gradients each time."""
    return lambda: optimizer.step()


def our_step(features: int, layers: int, preset: str, recipe: str, **options: Any) -> Step:
    """A step of ours: of bfloat16 weights where there is no recipe, of float32 ones for its preset."""
    dtype = torch.float32 if preset == "float32" else torch.bfloat16
    torch.manual_seed(0)
    model = nn.ModuleList(qt.Linear(features, features, bias=False, dtype=dtype) for _ in range(layers))
    if recipe:
        qt.quantize_weights(model, RECIPES[recipe])
    optimizer = optim.AdamW(model.parameters(), preset=preset, **options)
    x = torch.randn(16, features, dtype=dtype)
    with qt.autocast(RECIPES.get(recipe, get("bf16"))):
        for layer in model:
            (layer(x) * torch.randn(16, features, dtype=dtype)).sum().mul(1e-3).backward()

    def step() -> None:
        # An optimizer of codes looks up their layers, so the model must stay alive.
        assert model
        optimizer.step()

    return step


CASE = Case(
    name="optimizer-step",
    title=f"A step of AdamW over {LAYERS} matrices of {FEATURES} by {FEATURES}, against torch's fused",
    notes=(
        "Interleaved in one process, one thread, processor time; the median of each round's ratio to "
        "`torch.optim.AdamW(fused=True)` over float32. Ours: weights in codes where a recipe is named, else in "
        "bfloat16, or float32 for its preset; gradients as the preset keeps them. torch's default is its loop "
        "over parameters. torchao's compile themselves."
    ),
    measure=measure,
)
