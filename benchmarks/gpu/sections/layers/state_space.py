"""Kernels of Mamba-2's scan and convolution: compared with float64, then timed together with others."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import Step, interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.layers.layer import report
from quaver.torch.nn.ssm import scan
from quaver.torch.nn.ssm.causal_conv import causal_conv1d
from quaver.torch.nn.ssm.chunked_scan import recurrence, steps_of
from quaver.torch.nn.ssm.scan import ssd

#: Maximum relative RMS error against float64 on the same inputs, as the kernels' docstrings promise.
OF_SCAN = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
OF_CONVOLUTION = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
#: Baseline of all other rows.
BASE = "scan in plain torch"


class Size(NamedTuple):
    """Sizes of a scan."""

    batch: int
    tokens: int
    heads: int
    dim: int
    groups: int
    state: int


#: Sizes of comparisons, with tokens that no chunk divides, and of timings: a Mamba-2 layer with 4096 features.
COMPARED = {torch.float32: Size(2, 300, 8, 32, 2, 32), torch.bfloat16: Size(2, 300, 8, 64, 2, 128)}
TIMED, TOY = Size(4, 2048, 64, 64, 8, 128), Size(1, 20, 2, 4, 1, 4)
TAPS = 4


def drawn(size: Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, dt, A, B, C, D and dt_bias of a scan as leaves."""
    torch.manual_seed(0)
    tokens = size.batch, size.tokens
    with torch.device(device):
        values = [
            torch.randn(*tokens, size.heads, size.dim).to(dtype),
            torch.randn(*tokens, size.heads).to(dtype),
            -torch.rand(size.heads),
            (torch.randn(*tokens, size.groups, size.state) * size.state**-0.5).to(dtype),
            torch.randn(*tokens, size.groups, size.state).to(dtype),
            torch.randn(size.heads),
            torch.randn(size.heads) - 2,
        ]
    return [value.requires_grad_() for value in values]


def channels(size: Size, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, weight and bias of the convolution as leaves; x is a view into the output of a projection."""
    torch.manual_seed(0)
    inner, both = size.heads * size.dim, 2 * size.groups * size.state
    with torch.device(device):
        wide = torch.randn(size.batch, size.tokens, 2 * inner + both).to(dtype)
        weight, bias = torch.randn(inner + both, TAPS), torch.randn(inner + both)
    return [wide[..., inner:].detach().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]


def scanned(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    return ssd(x, dt, A, B, C, D=D, dt_bias=bias)[0]


def exact_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    return recurrence(x, steps_of(dt, bias), A, B, C, D)[0]


def plain_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x.mT, (TAPS - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None].to(x.dtype), bias.to(x.dtype), groups=weight.shape[0])).mT


def compare(
    name: str,
    ours: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    leaves: Callable[..., list[Tensor]],
    within: Mapping[torch.dtype, float],
) -> Case:
    """Return a case that compares outputs and gradients with float64 on the same inputs."""

    def measure(setting: Setting, findings: Findings) -> None:
        for dtype, size in COMPARED.items():
            given = leaves(TOY if setting.toy else size, dtype, setting.device)
            with setting.kernels():
                y = ours(*given)
                g = torch.randn_like(y)
                results = [y, *torch.autograd.grad(y, given, g)]
            wide = [t.detach().double().requires_grad_() for t in given]
            if setting.hollow:
                continue
            truth = exact(*wide)
            expected = [truth, *torch.autograd.grad(truth, wide, g.double())]
            error = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True))
            subject = f"{name} {str(dtype).removeprefix('torch.')}"
            findings.add(subject, "error", error * 1e6, "ppm")
            if not error <= within[dtype]:
                findings.failures.append(f"{subject}: an error of {error:.1e}; {within[dtype]:.0e} is promised")

    return Case(f"{name} compared", measure)


def stepped(run: Callable[..., Tensor], given: Sequence[Tensor]) -> Step:
    """Return a step of forward and backward, with the gradient of the first call."""
    gradient: list[Tensor] = []

    def step() -> None:
        y = run(*given)
        if not gradient:
            gradient.append(torch.ones_like(y))
        torch.autograd.grad(y, given, gradient[0])

    return step


def with_implementation(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function restricted to one implementation."""

    def chosen(*given: Tensor) -> Tensor:
        with qt.only(name):
            return run(*given)

    return chosen


def plain_torch(step: Step) -> Step:
    def plain() -> None:
        with qt.only("reference"):
            step()

    return plain


def missing(name: str, setting: Setting) -> str:
    """Return why a package cannot be measured, or ""."""
    if setting.hollow:
        return f"{name} is not measured where there is no card"
    return "" if importlib.util.find_spec(name) else f"{name} is not installed"


def timed_scan(setting: Setting, findings: Findings) -> None:
    given = drawn(TOY if setting.toy else TIMED, torch.bfloat16, setting.device)
    steps: dict[str, Any] = {BASE: plain_torch(stepped(scanned, given))}
    with setting.kernels():
        steps["quaver scan"] = stepped(scanned, given)
    for name in scan.PACKAGES:
        why = missing(name, setting)
        if why:
            findings.failures.append(why)
        else:
            steps[name] = stepped(with_implementation(name, scanned), given)
    with setting.kernels():
        report(interleave(steps, setting, findings), findings)


def timed_convolution(setting: Setting, findings: Findings) -> None:
    given = channels(TOY if setting.toy else TIMED, torch.bfloat16, setting.device)
    steps: dict[str, Any] = {"conv1d and silu of torch": stepped(plain_convolution, given)}
    with setting.kernels():
        steps["quaver convolution"] = stepped(causal_conv1d, given)
    why = missing("causal_conv1d", setting)
    if why:
        findings.failures.append(why)
    else:
        from causal_conv1d import causal_conv1d_fn  # type: ignore[import-not-found]

        def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y: Tensor = causal_conv1d_fn(x.mT, weight, bias, activation="silu")
            return y.mT

        steps["causal_conv1d"] = stepped(theirs, given)
    with setting.kernels():
        report(interleave(steps, setting, findings), findings)


def cases(setting: Setting) -> list[Case]:
    return [
        compare("scan", scanned, exact_scan, drawn, OF_SCAN),
        compare("convolution", causal_conv1d, plain_convolution, channels, OF_CONVOLUTION),
        Case("scan", timed_scan),
        Case("convolution", timed_convolution),
    ]


SECTION = Section(
    name="state-space",
    title="The scan and the convolution of Mamba-2 forward + backward, 8192 tokens",
    notes=(
        "64 heads of 64 features in 8 groups, states of 128, 6144 channels of 4 taps, bf16. Errors are the largest of "
        "outputs and gradients against float64. Speed-ups are over plain torch operations; mamba_ssm, fla and "
        "causal_conv1d where they are installed."
    ),
    seconds=30,
    cases=cases,
)
