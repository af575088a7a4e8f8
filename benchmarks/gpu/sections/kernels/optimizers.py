"""The kernel of an optimizer's step of one matrix: compared bit by bit with plain torch, then timed by its bytes."""

from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.kernels.ceilings import copy_rate
from quaver import recipes
from quaver.reference.optimizer_state import PRESETS, matrix_footprint
from quaver.torch import optim

#: Shapes of compared and of timed matrices, [out, in].
COMPARED, TIMED, TOY = (384, 640), (8192, 8192), (32, 128)
#: Shape of each matrix whose states are in host memory; the CPU steps it eagerly.
HOSTED = (1024, 1024)
#: Storage of matrices by preset.
KEPT = {"lean": "codes", "balanced": "codes", "exact": "bfloat16", "float32": "float32"}
RULES = {"AdamW": optim.AdamW, "Lion": optim.Lion}


def stepped(shape: tuple[int, int], preset: str, rule: Any, setting: Setting) -> tuple[nn.Module, Any]:
    """Return a layer with a gradient, and its optimizer."""
    torch.manual_seed(0)
    rows, columns = shape
    dtype = torch.bfloat16 if KEPT[preset] == "bfloat16" else torch.float32
    layer = qt.Linear(columns, rows, bias=False, dtype=dtype, device=setting.device)
    if KEPT[preset] == "codes":
        qt.quantize_weights(layer, "tensorwise")
    optimizer = rule(layer.parameters(), lr=1e-3, preset=preset)
    x = torch.randn(64, columns, device=setting.device, dtype=dtype)
    with qt.autocast("tensorwise"):
        layer(x).float().square().mean().backward()
    return layer, optimizer


def states(layer: nn.Module, optimizer: Any) -> list[Tensor]:
    p = next(layer.parameters())
    weight = p.tensors() if isinstance(p, qt.QuantizedTensor) else [p.detach()]
    return [*weight, *layer.buffers(), *optimizer.state[p].values()]


def compare(name: str, preset: str, rule: Any, setting: Setting, findings: Findings) -> None:
    """Add the number of a kernel's wrong bytes after three steps."""
    both = []
    for chosen in ("triton", "reference"):
        layer, optimizer = stepped(TOY if setting.toy else COMPARED, preset, rule, setting)
        for _ in range(1 if setting.hollow else 3):
            with qt.only(chosen):
                optimizer.step()
        both.append(states(layer, optimizer))
    pairs = zip(*both, strict=True)
    wrong = sum(int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum()) for a, b in pairs)
    findings.add(name, "differing", wrong, "elements")
    if wrong and not setting.hollow:
        findings.failures.append(f"{name}: {wrong} bytes of weight and states are not plain torch's")


def measured(name: str, preset: str, rule: Any) -> Case:
    def measure(setting: Setting, findings: Findings) -> None:
        compare(name, preset, rule, setting, findings)
        shape = TOY if setting.toy else TIMED
        _, optimizer = stepped(shape, preset, rule, setting)
        steps: dict[str, Any] = {name: optimizer.step}
        moments = 1 if rule is optim.Lion else 2
        spec = recipes.tensorwise().fprop.b if KEPT[preset] == "codes" else None
        moved = {name: matrix_footprint(PRESETS[preset], shape, KEPT[preset], spec, moments).moved}
        if preset == "float32" and moments == 2:
            theirs = torch.randn(shape, device=setting.device, requires_grad=True)
            theirs.grad = torch.randn_like(theirs)
            fused = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
            steps["torch AdamW, fused"], moved["torch AdamW, fused"] = fused.step, 28 * theirs.numel()
        with setting.kernels():
            timings = interleave(steps, setting, findings)
        for subject, timing in timings.items():
            findings.add(subject, "time", timing.seconds * 1e6, "µs")
            findings.add(subject, "rate", moved[subject] / timing.seconds / 1e12, "TB/s")
            findings.add(subject, "of a copy", 100 * moved[subject] / timing.seconds / copy_rate(setting), "%")

    return Case(name, measure)


def in_host_memory(setting: Setting, findings: Findings) -> None:
    """Time steps of several matrices with states on the device and in host memory."""
    shape, count = (TOY, 1) if setting.toy else (HOSTED, 8)
    steps: dict[str, Any] = {}
    models = []
    for offload in (None, "stream", "cpu"):
        models.append(nn.ModuleList(stepped(shape, "lean", optim.AdamW, setting)[0] for _ in range(count)))
        parameters = list(models[-1].parameters())
        optimizer = optim.AdamW(parameters, lr=1e-3, preset="lean", offload=offload)
        steps[f"{count} matrices, states on the device" if offload is None else f"offload={offload!r}"] = optimizer.step
    with setting.kernels():
        timings = interleave(steps, setting, findings)
    for subject, timing in timings.items():
        findings.add(subject, "time", timing.seconds * 1e6, "µs")


def cases(setting: Setting) -> list[Case]:
    """Return a case for each preset that a kernel steps, with AdamW, for Lion, and for states in host memory."""
    rows = [("AdamW", preset) for preset in ("lean", "float32", "balanced", "exact")] + [("Lion", "lean")]
    kernels = [measured(f"{rule} {preset}", preset, RULES[rule]) for rule, preset in rows]
    # Tensors of a card that is not there are all in one memory.
    return kernels if setting.hollow else [*kernels, Case("states in host memory", in_host_memory)]


SECTION = Section(
    name="optimizers",
    title="An optimizer's step",
    notes=(
        "One matrix by the kernel, a gradient that stays; each is far larger than the caches. `differing`: bytes of "
        "weight and states that are not those of plain torch operations after three steps. The bytes of a rate are "
        "what a step in one pass cannot but read and write (`core.states.footprint`)."
    ),
    seconds=30,
    cases=cases,
)
