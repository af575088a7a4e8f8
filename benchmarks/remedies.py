"""Remedies for a run that loses precision, each with its measured effect in a small setting that needs it.

SNR is -10 log10 of the mean relative squared error of rows or columns, whichever is larger (`error` of `qt.inspect`),
against the same GEMM in high precision. Losses are those of a small GPT on bytes of Python's standard library, paired
by seed with the same run without quantization.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

import quaver
import quaver.torch as qt
from benchmarks.acceptance.open_loop import SEQUENCE, Gpt
from benchmarks.measuring import results
from quaver.torch.compare import AnyRecipe
from quaver.train.data import join_bytes, read_text, split

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "diverged.md"
MARKS = "<!-- python -m benchmarks remedies writes from here -->", "<!-- to here, remedies -->"
COLUMNS = ("remedy", "when", "code", "measured effect")
WIDTH = 256
BATCH, LAYERS, PEAK = 8, 2, 3e-3
#: Optimizer steps of a run and the share before the change of recipe.
STEPS, SHARE = 200, 0.85
#: qt.compare takes no schedule: the loop reverts the model of the recipe with this name.
SCHEDULED = replace(quaver.recipes.nvfp4(), name="nvfp4 until 85%")
RUNS: dict[str, AnyRecipe] = {
    "nvfp4": "nvfp4",
    "last": {f"blocks.{LAYERS - 1}.*": None, "*": "nvfp4"},
    "schedule": SCHEDULED,
    "nearest": "nvfp4(stochastic_rounding=False)",
}


@dataclass(frozen=True)
class Settings:
    """Size of the trained runs."""

    steps: int = STEPS
    seeds: int = 4


@dataclass(frozen=True)
class Remedy:
    """One row of the table."""

    name: str
    when: str
    code: str
    measure: Callable[[Settings], str]


# ---- SNR of one GEMM ----


def inspected(
    model: nn.Module, recipe: AnyRecipe, x: Tensor, loss_of: Callable[[Tensor], Tensor]
) -> dict[tuple[str, str, str], float]:
    """Return the SNR by layer, GEMM and tensor of one forward and backward of a model, which is converted for it."""
    qt.convert(model, recipe)
    x = x.clone().requires_grad_()  # [T, K]; the first layer too gets a dgrad
    with qt.inspect(model, every=1) as inspector:
        loss_of(model(x)).backward()
        inspector.step()
    qt.revert(model)
    return {(row["layer"], row["gemm"], row["tensor"]): decibels(row["error"]) for row in inspector.rows}


def decibels(error: float) -> float:
    return math.inf if error == 0 else -10 * math.log10(error)


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return the mean relative squared error of rows or columns, whichever is larger."""
    noise, signal = (y - exact).square(), exact.square()
    return max((noise.sum(axis) / signal.sum(axis)).mean().item() for axis in (0, 1))


def one_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


def weighted(y: Tensor) -> Tensor:
    """Return a loss with standard normal gradients, the same in every call."""
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum()


def hadamard(_: Settings) -> str:
    model, x = one_linear(), torch.randn(WIDTH, WIDTH)
    x[:, ::32] *= 8
    parts = []
    for name in ("mxfp4", "nvfp4"):
        recipe = quaver.recipes.get(name)
        line = recipe.fprop.a
        assert line is not None
        plain, rotated = (
            quaver.recipes.override(recipe, fprop=quaver.GemmSpec(spec, spec))
            for spec in (line, replace(line, hadamard=True))
        )
        before, after = (inspected(model, each, x, weighted)["0", "fprop", "output"] for each in (plain, rotated))
        parts.append(f"{name} {before:.1f} → {after:.1f} dB")
    return f"output, every 32nd channel 8 times as large: {', '.join(parts)}"


class SwiGLU(nn.Module):
    """SwiGLU whose channel 0 is huge for some tokens: its rows of gate and up are parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(WIDTH, 64, bias=False)
        with torch.no_grad():
            self.gate_proj.weight[0] *= 200
            self.up_proj.weight[0] = self.gate_proj.weight[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
def smooth(mlp: nn.Module, x: Tensor) -> None:
    """Move half of large channels' excess from down_proj's input to its weight."""
    hidden = silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    amax = hidden.flatten(0, -2).abs().amax(0)  # of each channel
    excess = (amax / amax.median()).clamp(min=1).log2()
    scale = torch.exp2((excess / 2).round())  # powers of two: exact
    mlp.up_proj.weight /= scale[:, None]
    mlp.down_proj.weight *= scale


def smooth_swiglu(_: Settings) -> str:
    torch.manual_seed(0)
    model, x = SwiGLU(), torch.randn(512, 64)
    before = inspected(model, "tensorwise", x, weighted)
    unchanged = model(x)
    smooth(model, x)
    assert torch.allclose(model(x), unchanged, rtol=1e-4)
    after = inspected(model, "tensorwise", x, weighted)
    at = {"output": ("down_proj", "fprop", "output"), "weight gradient": ("down_proj", "wgrad", "grad_weight")}
    parts = [f"{name} {before[key]:.1f} → {after[key]:.1f} dB" for name, key in at.items()]
    return f"down_proj under tensorwise: {', '.join(parts)}"


def gradient_format(_: Settings) -> str:
    model, x = one_linear(), torch.randn(WIDTH, WIDTH)
    parts = []
    for text, span in (("tokens' gradients spread over 2²⁴", 24), ("of equal size", 0)):
        sizes = torch.exp2(-span * torch.rand(WIDTH, 1, generator=torch.Generator().manual_seed(2)))
        before, after = (
            inspected(model, f"tensorwise(format={format!r})", x, lambda y, sizes=sizes: weighted(y * sizes))  # type: ignore[misc]
            for format in ("e4m3", "hybrid")
        )
        key = ("0", "dgrad", "grad_input")
        parts.append(f"{text} {before[key]:.1f} → {after[key]:.1f} dB")
    return f"input gradient, {', '.join(parts)}"


def margin(_: Settings) -> str:
    growth = 1.9
    worst, clipped = [], []
    for margin in (0, 1):
        model = one_linear()
        qt.convert(model, f"delayed(margin={margin})")
        with qt.inspect(model, every=1) as inspector:
            for step in range(16):
                weighted(model(torch.randn(WIDTH, WIDTH) * growth**step)).backward()
                inspector.step()
        rows = [row for row in inspector.rows if row["step"] > 0]
        worst.append(min(decibels(row["error"]) for row in rows if row["tensor"] == "output"))
        clipped.append(max(row["saturated"] for row in rows if row["tensor"] == "input" and row["gemm"] == "fprop"))
    return (
        f"output in the worst of 16 steps, inputs growing {growth}-fold per step: {worst[0]:.1f} → {worst[1]:.1f} dB, "
        f"{clipped[0]:.1%} → {clipped[1]:.1%} saturated"
    )


# ---- losses ----


@cache
def text() -> Tensor:
    """Bytes of the training split of the standard library, int64."""
    return torch.from_numpy(join_bytes(split(read_text(()))[0]).astype("int64"))


@cache
def trained(settings: Settings) -> dict[str, list[float]]:
    """Return the loss of each seed minus that of the run without quantization, by name of `RUNS` and "null"."""

    def make_model(seed: int) -> nn.Module:
        return Gpt(64, LAYERS, 4, 128)

    def train(model: nn.Module, seed: int) -> Iterator[float]:
        names = {m.recipe.name for m in model.modules() if isinstance(m, qt.Linear) and m.recipe is not None}
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps, eta_min=PEAK / 10)
        for step in range(settings.steps):
            if SCHEDULED.name in names and step == int(SHARE * settings.steps):
                qt.revert(model)
            starts = torch.randint(len(text()) - SEQUENCE, (BATCH, 1))
            batch = text()[starts + torch.arange(SEQUENCE + 1)]  # [B, S + 1]
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            yield loss.item()

    compared = qt.compare(make_model, train, RUNS, seeds=settings.seeds)
    last = max(1, settings.steps // 10)
    final = {
        name: [statistics.mean(losses[-last:]) for losses in runs.values()] for name, runs in compared.losses.items()
    }
    return {
        name: [a - b for a, b in zip(ends, final["bf16"], strict=True)]
        for name, ends in final.items()
        if name != "bf16"
    }


def versus(before: str, after: str) -> Callable[[Settings], str]:
    """Return a measurement of two of `RUNS`: losses minus those without quantization, and the paired change."""

    def measure(settings: Settings) -> str:
        runs = trained(settings)
        change = [b - a for a, b in zip(runs[before], runs[after], strict=True)]
        return f"loss minus bf16 {spread(runs[before])} → {spread(runs[after])}, change {spread(change)} nats"

    return measure


def spread(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):+.4f} ± {error:.4f}"


def stochastic(settings: Settings) -> str:
    x, gradient = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    exact = gradient.t() @ x
    snrs = []
    for flag in (False, True):
        model = one_linear()
        qt.convert(model, quaver.recipes.nvfp4(stochastic_rounding=flag))
        weight = model.get_submodule("0").weight
        for repeat in range(64):
            model(x).backward(gradient)
            if repeat in (0, 63):
                assert isinstance(weight.grad, Tensor)
                snrs.append(decibels(relative_error(weight.grad / (repeat + 1), exact)))
    once, often, once_stochastic, often_stochastic = snrs
    return (
        f"weight gradient, mean of 64 passes over one batch: {often:.1f} → {often_stochastic:.1f} dB, of one pass "
        f"{once:.1f} → {once_stochastic:.1f} dB; {versus('nearest', 'nvfp4')(settings)}"
    )


REMEDIES = (
    Remedy(
        "Hadamard rotation of both operands of a GEMM",
        "4 bits, one scale per 32; a few channels flush the rest of their block",
        "`rotated`, below",
        hadamard,
    ),
    Remedy(
        "smooth-SwiGLU (arXiv:2409.12517)",
        "few channels of `down_proj`'s input are huge, scales are per tensor",
        "`smooth(mlp, x)`, below",
        smooth_swiglu,
    ),
    Remedy(
        "E5M2 gradients instead of E4M3",
        "`flushed` of `grad_output` is large",
        '`tensorwise(format="hybrid")`, the default',
        gradient_format,
    ),
    Remedy("margin", "`saturated` under `delayed`", "`delayed(margin=1)`", margin),
    Remedy(
        "last layers in bf16",
        "4 bits",
        f'`{{"blocks.{LAYERS - 1}.*": None, "*": "nvfp4"}}`',
        versus("nvfp4", "last"),
    ),
    Remedy("schedule", "4 bits", '`schedule("nvfp4 until 85%, bf16", steps=n)`', versus("nvfp4", "schedule")),
    Remedy(
        "stochastic rounding of gradients",
        "4 bits; rounding to nearest errs the same way in every step",
        "`nvfp4(stochastic_rounding=True)`, the default",
        stochastic,
    ),
)


def table(settings: Settings, say: Callable[[str], None]) -> list[str]:
    """Return the lines of the table in Markdown."""
    rows = []
    for remedy in REMEDIES:
        rows.append([remedy.name, remedy.when, remedy.code, remedy.measure(settings)])
        say(f"{remedy.name}: {rows[-1][-1]}")
    chance = f"Chance alone, weights changed by 10⁻⁵, gives {spread(trained(settings)['null'])} nats"
    runs = f"{settings.steps} steps, {settings.seeds} seeds, means ± standard errors"
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, *rows)]
    return [lines[0], "|---|---|---|---|", *lines[1:], "", f"{chance}; {runs}."]


def run(quick: bool, write: bool, console: Console) -> None:
    """Measure every remedy, print the table, and write it into docs/guides/diverged.md."""
    lines = table(Settings(steps=10, seeds=2) if quick else Settings(), lambda line: console.print(line, markup=False))
    print("\n".join(["", *lines]))
    if write:
        results.write_between(PAGE, *MARKS, lines)
