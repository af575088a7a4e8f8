"""Memory of a step: its peak, and the bytes saved for backward, beyond what was allocated before."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import blamed
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers import linears
from benchmarks.gpu.sections.layers.layer import plain_layer
from benchmarks.gpu.sections.layers.linears import some
from benchmarks.measuring.steps import touch
from benchmarks.subjects import blocks
from quaver import recipes
from quaver.recipes.spec import Recipe

SHAPE = (8192, 4096, 14_336)


def step_memory(model: nn.Module, x: Tensor, g: Tensor, recipe: Recipe | None, setting: Setting) -> tuple[int, int]:
    """Return (peak, saved for backward) of the second step in bytes; zeros without a GPU."""
    for _ in range(1 if setting.toy else 2):
        touch(list(model.parameters()))
        before = allocated(setting)
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats(setting.device)
        with qt.autocast(recipe, enabled=recipe is not None):
            y = model(x)
        saved = allocated(setting) - before
        y.backward(g)
        peak = torch.cuda.max_memory_allocated(setting.device) - before if setting.cuda else 0
        del y
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
    return peak, saved


def allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated(setting.device) if setting.cuda else 0


def of(
    head: str,
    plain: nn.Module,
    ours: Callable[[], nn.Module],
    x: Tensor,
    g: Tensor,
    setting: Setting,
    findings: Findings,
) -> None:
    """Measure the plain module, and ours under every recipe that the GPU supports."""
    with setting.kernels():
        for name in ("bf16", *some(setting)):
            subject = f"{head}: {'quaver ' if name != 'bf16' else ''}{name}"
            model = plain if name == "bf16" else ours()
            with blamed(subject, setting, findings):
                peak, saved = step_memory(model, x, g, None if name == "bf16" else recipes.get(name), setting)
                findings.add(subject, "peak of a step", peak / 2**20, "MiB")
                findings.add(subject, "kept for backward", saved / 2**20, "MiB")


def linear(setting: Setting, findings: Findings) -> None:
    shape = linears.toy(SHAPE) if setting.toy else SHAPE
    base, x, g = linears.layer(shape, setting)
    of(f"Linear {linears.label(shape)}", base, lambda: linears.ours(base), x, g, setting, findings)


def llama(setting: Setting, findings: Findings) -> None:
    plain, size, x, g = plain_layer(setting)
    of("Llama-8B layer", plain, lambda: blocks.ours(plain, size), x, g, setting, findings)


SECTION = Section(
    name="memory",
    title="Memory of a step",
    notes=(
        "MiB that torch has allocated beyond what was there before the step (weights, input, the output's gradient), "
        "of the second step after a change of the weights: gradients and outputs count, and so do quantized weights "
        "unless the layer has kept them from the first step."
    ),
    seconds=15,
    cases=lambda setting: [Case("linear", linear), Case("layer", llama)],
)
