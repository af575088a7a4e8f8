"""Time of a Llama-8B layer, forward and backward, compared with the same layer of torch's own modules."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmarks.gpu.measuring.clock import Step, interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.linears import some
from benchmarks.measuring.steps import step_of
from benchmarks.measuring.timing import Timing
from benchmarks.subjects import blocks, peer
from benchmarks.subjects.blocks import Plain, Size
from quaver import recipes

LLAMA, TOKENS = Size(dim=4096, heads=32, groups=8, hidden=14_336), 8192
TOY, TOY_TOKENS = Size(dim=64, heads=2, groups=1, hidden=64), 8
BASE = "bf16 torch"


def plain_layer(setting: Setting) -> tuple[Plain, Size, Tensor, Tensor]:
    """Return the layer of torch's modules, its size, its input and the gradient of its output."""
    size, tokens = (TOY, TOY_TOKENS) if setting.toy else (LLAMA, TOKENS)
    torch.manual_seed(0)
    with torch.device(setting.device):
        plain = Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm)
        x = torch.randn(1, tokens, size.dim, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(1, tokens, size.dim, dtype=torch.bfloat16)
    return plain, size, x, g


def eager(setting: Setting, findings: Findings) -> None:
    """torch's parts, ours without a recipe and under every one that the card has, and torchao's linear layers."""
    plain, size, x, g = plain_layer(setting)
    steps: dict[str, Step] = {
        BASE: step_of(plain, x, g),
        "quaver bf16": step_of(blocks.ours(plain, size), x, g, changing=True),
    }
    for name in some(setting):
        steps[f"quaver {name}"] = step_of(blocks.ours(plain, size), x, g, recipes.get(name), changing=True)
    for name in () if setting.why_no_peer() else peer.RECIPES:
        steps[f"torchao {name}"] = step_of(peer.converted_copy(plain, name, emulate=not setting.cuda), x, g)
    with setting.kernels():
        report(interleave(steps, setting, findings), findings)


def compiled(subject: str, setting: Setting, findings: Findings) -> None:
    """torch's parts, or those with torchao's linear layers, through torch.compile."""
    torch.compiler.reset()
    plain, _, x, g = plain_layer(setting)
    other = plain
    if subject != BASE:
        other = peer.converted_copy(plain, subject.removeprefix("torchao "), emulate=not setting.cuda)
    fast = step_of(setting.compiled(other), x, g)
    timings = interleave({"eager": step_of(plain, x, g), f"{subject} compiled": fast}, setting, findings)
    timings.pop("eager", None)
    report(timings, findings)


def report(timings: Mapping[str, Timing], findings: Findings) -> None:
    for name, timing in timings.items():
        findings.add(name, "time", timing.seconds * 1e3, "ms")
        findings.add(name, "speed-up", 1 / timing.ratio, "x")


def cases(setting: Setting) -> list[Case]:
    # One compiled model per case, because compiling is slow, so that each is reported separately.
    # torchao's recipe with a target comes first; compiled bf16 is least important.
    others = [] if setting.why_no_peer() else [f"torchao {name}" for name in peer.RECIPES]
    return [
        Case("eager", eager),
        *(
            Case(f"{name} compiled", lambda s, findings, name=name: compiled(name, s, findings))
            for name in (() if setting.hollow else (*others, BASE))
        ),
    ]


SECTION = Section(
    name="layer",
    title="A Llama-8B layer forward + backward, 8192 tokens, against torch's parts",
    notes=(
        "bf16; RMSNorm, one matrix for q, k and v, rope, scaled_dot_product_attention, one matrix for gate and up, "
        "silu. Ours has the same weights, which count as changed after every step; `quaver bf16` is without a recipe. "
        "Compiled rows are timed by themselves beside torch's parts, eager."
    ),
    seconds=60,
    cases=cases,
)
