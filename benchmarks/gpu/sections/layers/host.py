"""Host time of a layer: wall-clock time of calls on tensors so small that the GPU waits for the host."""

import statistics

import torch
from torch import nn

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import Step, blamed, host_seconds
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.linears import ours, some
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import no_collection
from quaver import recipes

FEATURES, CALLS, ROUNDS = 16, 20, 15
BASE = "bf16 nn.Linear"


def measure(setting: Setting, findings: Findings) -> None:
    """Time every recipe that the GPU supports, forward and with backward."""
    base = nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16, device=setting.device)
    x = torch.randn(FEATURES, FEATURES, dtype=torch.bfloat16, device=setting.device, requires_grad=True)
    g = torch.randn_like(x)
    layers: dict[str, nn.Module] = {BASE: base, **{f"quaver {name}": ours(base) for name in some(setting)}}

    def forward(layer: nn.Module) -> Step:
        return lambda: layer(x)

    def both(layer: nn.Module) -> Step:
        return step_of(layer, x, g)

    with setting.kernels():
        for column, build in (("forward", forward), ("forward + backward", both)):
            add(column, {name: build(layer) for name, layer in layers.items()}, setting, findings)


def add(column: str, steps: dict[str, Step], setting: Setting, findings: Findings) -> None:
    """Microseconds of each, and the median over rounds of its ratio to nn.Linear."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    calls, rounds = (1, 2) if setting.toy or setting.hollow else (CALLS, ROUNDS)
    with no_collection():
        for number in range(rounds + 1):
            for name, step in list(steps.items()):
                with blamed(f"{name}, {column}", setting, findings):
                    times[name].append(stretch(name, step, setting, calls))
                if len(times[name]) <= number:
                    del steps[name], times[name]
    for name, (_, *own) in times.items():
        findings.add(name, column, statistics.median(own) * 1e6, "µs")
        if BASE in times:
            ratios = [a / b for a, b in zip(own, times[BASE][1:], strict=True)]
            findings.add(name, f"{column}, ratio", statistics.median(ratios), "x")


def stretch(name: str, step: Step, setting: Setting, calls: int) -> float:
    """Return the seconds of a call under a recipe; autocast is entered once, as around a model."""
    if name == BASE:
        return host_seconds(step, setting, calls)
    with qt.autocast(recipes.get(name.removeprefix("quaver "))):
        step()
        return host_seconds(step, setting, calls)


SECTION = Section(
    name="host",
    title="Host time of a linear layer, 16 x 16",
    notes=(
        "bf16, without bias, 16 features and tokens: the wall clock of 20 calls until the last has returned, divided "
        "by 20; interleaved, medians of 15 rounds. Weights do not change; autocast is entered once around the calls."
    ),
    seconds=15,
    cases=lambda setting: [Case("linear", measure)],
)
