"""Kernels that make what is quantized, and quantize it on the way: norms, activations; and amax, transpose and rope."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring.clock import interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.kernels.quantizing import differing, poisoned, report
from quaver import E4M3, QuantSpec
from quaver.torch.numerics import reference

#: Rows, features and hidden features of the two layers that are timed: the first large enough to time a kernel by.
SIZES = {"large": (16_384, 8192, 14_336), "layer": (8192, 4096, 14_336)}
TOY_SIZES = {"large": (32, 128, 128), "layer": (16, 128, 128)}
HEAD = 128
EPS = 1e-5
BF16, FLOAT32 = torch.bfloat16, torch.float32
TENSOR, ROW, BLOCKS = QuantSpec(E4M3), QuantSpec(E4M3, (1, None)), QuantSpec(E4M3, (1, 128))
MX = QuantSpec(E4M3, (1, 32), "e8m0")
#: Results of a norm or an activation: (name, spec, whether the tensor's factor is known, bytes of an element's codes).
WRITES = (
    ("bf16 and its amax", TENSOR, False, 2.0),
    ("codes by a known factor", TENSOR, True, 1.0),
    ("row-wise codes", ROW, False, 1.0),
    ("1x128 codes", BLOCKS, False, 1 + 4 / 128),
    ("MXFP8 codes", MX, False, 1 + 1 / 32),
)

#: Tensors in, tensors and operands out.
Run = Callable[..., Any]
#: Rows, features and hidden features.
Sizes = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A timed kernel."""

    name: str
    #: The inputs' shapes, bf16.
    shapes: tuple[tuple[int, ...], ...]
    run: Run
    #: Bytes that must be moved.
    moved: float
    #: Runs the kernel on other inputs and says how many elements are wrong.
    wrong: Callable[[Setting], int] | None = None
    #: Likewise, the largest relative RMS from float64 of what float32 inputs give.
    error: Callable[[Setting], float] | None = None


def factor(setting: Setting) -> Tensor:
    return torch.full((1,), 4.0, device=setting.device)


def quantized_right(produced: Any, spec: QuantSpec, known: Tensor | None) -> int:
    """Count the wrong elements of operands that were quantized together with their source."""
    flat = produced.y.reshape(-1, produced.y.shape[-1])
    expected = reference.quantize(flat, spec, None, known)
    if produced.quantized is not None:
        return differing(produced.quantized, expected)
    return int((produced.amax.view(-1) != expected.amax.view(-1)).sum())


def relative(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative RMS error of tensors against float64."""
    pairs = zip(results, expected, strict=True)
    return max(((a.double() - b).square().sum() / b.square().sum()).sqrt().item() for a, b in pairs)


def writing_rows(
    title: str, shapes: tuple[tuple[int, int], ...], read: float, kernel: Run, setting: Setting
) -> list[Row]:
    """Return a row for each of `WRITES`.

    Args:
        read: bytes read for each element of the result.
        kernel: takes inputs, a spec, the factor or None, and whether the result itself is written.
    """

    def run(spec: QuantSpec, known: bool) -> Run:
        e = factor(setting) if known else None
        return lambda *inputs: kernel(inputs, spec, e, spec == TENSOR and not known)

    def wrong(spec: QuantSpec, known: bool) -> Callable[[Setting], int]:
        inputs = [torch.randn(min(rows, 1000), dim, device=setting.device, dtype=BF16) for rows, dim in shapes]
        e = factor(setting) if known else None
        return lambda s: quantized_right(kernel(inputs, spec, e, True), spec, e)

    return [
        Row(
            name=f"{title} to {name}",
            shapes=shapes,
            run=run(spec, known),
            moved=shapes[0][0] * shapes[0][1] * (read + written),
            wrong=wrong(spec, known),
        )
        for name, spec, known, written in WRITES
    ]


def norm_rows(sizes: Sizes, setting: Setting) -> list[Row]:
    from quaver.torch.backends.gpu import norm

    rows, dim, _ = sizes
    gamma = torch.rand(dim, device=setting.device) + 0.5

    def forward(inputs: Sequence[Tensor], spec: QuantSpec, e: Tensor | None, output: bool) -> Any:
        return norm.normalized(inputs[0], gamma, None, "RMSNorm", EPS, spec, e, output)

    def error(s: Setting) -> float:
        x = torch.randn(min(rows, 1000), dim, device=s.device)
        g = torch.randn_like(x)
        y, mean, inverse = norm.forward(x, gamma, None, "RMSNorm", EPS)
        dx, grad_gamma, _ = norm.backward(g, x, gamma, None, mean, inverse, "RMSNorm")
        wide, weight = x.double().requires_grad_(), gamma.double().requires_grad_()
        expected = F.rms_norm(wide, (dim,), weight, EPS)
        return relative((y, dx, grad_gamma), (expected, *torch.autograd.grad(expected, (wide, weight), g.double())))

    inverse = torch.rand(rows, 1, device=setting.device) + 0.5
    mean = torch.empty(0, device=setting.device)
    backward = Row(
        name="RMSNorm backward",
        shapes=((rows, dim), (rows, dim)),
        run=lambda g, x: norm.backward(g, x, gamma, None, mean, inverse, "RMSNorm"),
        moved=rows * dim * 6.0,
        error=error,
    )
    return [*writing_rows("RMSNorm", ((rows, dim),), 2, forward, setting), backward]


def activation_rows(sizes: Sizes, setting: Setting) -> list[Row]:
    from quaver.torch.backends.gpu import activation

    rows, _, hidden = sizes

    def forward(inputs: Sequence[Tensor], spec: QuantSpec, e: Tensor | None, output: bool) -> Any:
        return activation.activated("swiglu", (), tuple(inputs), spec, e, output)

    def error(s: Setting) -> float:
        gate, up, g = torch.randn(3, min(rows, 1000), hidden, device=s.device)
        y = activation.forward("swiglu", (), (gate, up))
        gradients = activation.backward("swiglu", (), g, (gate, up))
        wide = gate.double().requires_grad_(), up.double().requires_grad_()
        expected = F.silu(wide[0]) * wide[1]
        return relative((y, *gradients), (expected, *torch.autograd.grad(expected, wide, g.double())))

    backward = Row(
        name="SwiGLU backward",
        shapes=((rows, hidden),) * 3,
        run=lambda g, gate, up: activation.backward("swiglu", (), g, (gate, up)),
        moved=rows * hidden * 10.0,
        error=error,
    )
    return [*writing_rows("SwiGLU", ((rows, hidden),) * 2, 4, forward, setting), backward]


def other_rows(sizes: Sizes, setting: Setting) -> list[Row]:
    from quaver.torch.backends.gpu import norm as rope
    from quaver.torch.backends.gpu import quantize

    rows, dim, _ = sizes
    heads = 2 if setting.toy else dim // HEAD
    angles = torch.rand(1, rows, 1, dim // heads // 2, device=setting.device)
    cos, sin = angles.cos(), angles.sin()

    def amax_wrong(s: Setting) -> int:
        x = torch.randn(rows - 1, dim - 1, dtype=BF16, device=s.device)
        return int(quantize.measure(x).item() != x.abs().max().item())

    def transpose_wrong(s: Setting) -> int:
        codes = torch.randint(256, (rows - 1, dim - 1), dtype=torch.uint8, device=s.device)
        transposed = quantize.transpose(codes.view(torch.float8_e4m3fn)).view(torch.uint8)
        return int((transposed != codes.t()).sum())

    return [
        Row(
            name="amax",
            shapes=((rows, dim),),
            run=quantize.measure,
            moved=rows * dim * 2.0,
            wrong=amax_wrong,
        ),
        Row(
            name="transpose of FP8",
            shapes=((rows, dim // 2),),
            run=lambda x: quantize.transpose(x.view(torch.float8_e4m3fn)),
            moved=rows * dim * 2.0,
            wrong=transpose_wrong,
        ),
        Row(
            name="rope of queries and keys, 4 to a group",
            shapes=((1, rows, heads, dim // heads), (1, rows, max(heads // 4, 1), dim // heads)),
            run=lambda q, k: rope.turn(q, k, cos, sin, False, False),
            moved=rows * (dim + dim // heads * max(heads // 4, 1)) * 4.0,
        ),
    ]


def measured(build: Callable[[Sizes, Setting], list[Row]], which: str, setting: Setting, findings: Findings) -> None:
    """Compare, then time every row of a family."""
    sizes = (TOY_SIZES if setting.toy else SIZES)[which]
    with setting.kernels():
        for row in build(sizes, setting):
            subject = f"{row.name}, {sizes[0]} tokens"
            with poisoned():
                if row.wrong is not None:
                    findings.add(subject, "differing", row.wrong(setting), "elements")
                if row.error is not None:
                    findings.add(subject, "error", 1e6 * row.error(setting), "ppm")
            inputs = itertools.cycle(
                [
                    [torch.randn(s, dtype=BF16, device=setting.device) for s in row.shapes]
                    for _ in range(sets(which, setting))
                ]
            )
            timings = interleave({subject: lambda row=row, inputs=inputs: row.run(*next(inputs))}, setting, findings)
            for timing in timings.values():
                report(subject, row.moved, timing.seconds, setting, findings)


def sets(which: str, setting: Setting) -> int:
    """Number of rotating inputs, enough that none is still in the caches when it is used again."""
    return 1 if setting.toy or setting.hollow else 2 if which == "large" else 5


def cases(setting: Setting) -> list[Case]:
    families = {"norms": norm_rows, "activations": activation_rows, "others": other_rows}
    return [
        Case(
            f"{name} of a {which}" if which == "layer" else f"{name}, {which}",
            lambda s, findings, build=build, which=which: measured(build, which, s, findings),
        )
        for which in ("large", "layer")[: 1 if setting.quick else 2]
        for name, build in families.items()
    ]


SECTION = Section(
    name="producers",
    title="Kernels that make what is quantized; 16384 tokens of 8192 features, 8192 of 4096; 14336 hidden",
    notes=(
        "As the kernels before. `differing` compares codes, scales and amaxes with the reference's of the same source; "
        "`error` is the relative RMS of results and gradients from float64, of float32 inputs. Backward measures the "
        "amax of its gradients on the way."
    ),
    seconds=25,
    cases=cases,
)
