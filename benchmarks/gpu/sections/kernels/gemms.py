"""GEMMs of quantized operands: rates by recipe and accumulation, and errors against float64."""

from contextlib import AbstractContextManager, nullcontext

import torch

import quaver.torch as qt
from benchmarks.gpu.measuring.clock import Step, interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from quaver.costs import ledger
from quaver.recipes import RECIPES
from quaver.recipes.spec import GemmSpec
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import functional, ops

#: [m, k] @ [n, k].T
SHAPES = ((8192, 4096, 4096), (8192, 14_336, 4096), (8192, 4096, 14_336), (8192, 28_672, 8192), (16_384, 14_336, 4096))
TOY, CHECKED = (32, 48, 64), (1024, 1536, 4096)
BF16, FLOAT32 = torch.bfloat16, torch.float32


def gemms() -> dict[str, GemmSpec]:
    """Return every distinct pair of operands by "recipe gemm", named after the first recipe with it."""
    labels: dict[GemmSpec, str] = {}
    for name, build in RECIPES.items():
        for gemm, spec in build().gemms.items():
            if spec.a is not None and spec.b is not None:
                labels.setdefault(GemmSpec(spec.a, spec.b), f"{name} {gemm}")
    return {label: spec for spec, label in labels.items()}


def modes(spec: GemmSpec) -> dict[str, tuple[torch.dtype, bool]]:
    """Return (dtype of the result, True for fast accumulation) by suffix of the name."""
    by_suffix = {"": (BF16, False)}
    if ledger.kind(spec) in ("tensor", "row"):
        by_suffix |= {", fast": (BF16, True), ", float32 out": (FLOAT32, False)}
    return by_suffix


def implementations(setting: Setting) -> AbstractContextManager[None]:
    """Without a GPU, use the native implementations as far as torch has them on a CPU."""
    return nullcontext() if setting.cuda else qt.only("native")


def operands(spec: GemmSpec, shape: tuple[int, int, int], setting: Setting) -> tuple[Quantized, Quantized]:
    m, n, k = shape
    torch.manual_seed(0)
    a = torch.randn(m, k, dtype=BF16, device=setting.device)
    b = torch.randn(n, k, dtype=BF16, device=setting.device) * 0.02
    assert spec.a is not None and spec.b is not None
    with setting.kernels():
        return functional.quantize(a, spec.a), functional.quantize(b, spec.b)


def runs_as(a: Quantized, b: Quantized, dtype: torch.dtype, fast: bool) -> str:
    """Return the name of the implementation of a product."""
    return next(name for name, why in ops.MATMUL.explain(a, b, dtype, None, fast) if not why)


def errors(setting: Setting, findings: Findings) -> None:
    """Compare float32 results for every pair of operands and both accumulations."""
    for name, spec in gemms().items():
        a, b = operands(spec, TOY if setting.toy else CHECKED, setting)
        expected = reference.double(a) @ reference.double(b).t()
        for fast in (False, True):
            with implementations(setting):
                y = functional.matmul(a, b, FLOAT32, None, fast).double()
                how = runs_as(a, b, FLOAT32, fast)
            error = ((y - expected).square().sum() / expected.square().sum()).sqrt().item()
            findings.add(name, f"error{', fast' if fast else ''}", error * 1e6, "ppm")
            if not error < 1 and not setting.hollow:
                findings.failures.append(f"{name}: the product by {how} is wrong: relative RMS {error:.3g} of float64")


def rates(shape: tuple[int, int, int], setting: Setting, findings: Findings) -> None:
    """Time all GEMMs at one size, alternately with bf16's."""
    m, n, k = shape
    a16 = torch.randn(m, k, dtype=BF16, device=setting.device)
    b16 = torch.randn(n, k, dtype=BF16, device=setting.device)
    head = f"{m} x {n} x {k}: "
    steps: dict[str, Step] = {head + "bf16": lambda: torch.mm(a16, b16.t())}
    with implementations(setting):
        for name, spec in gemms().items():
            try:
                a, b = operands(spec, shape, setting)
                for mode, (dtype, fast) in modes(spec).items():
                    label = f"{head}{name}{mode} ({runs_as(a, b, dtype, fast)})"
                    steps[label] = lambda a=a, b=b, dtype=dtype, fast=fast: functional.matmul(a, b, dtype, None, fast)
            except Exception as error:
                findings.failures.append(f"{head}{name}: {error}")
        timings = interleave(steps, setting, findings)
    for label, timing in timings.items():
        findings.add(label, "rate", 2.0 * m * n * k / timing.seconds / 1e12, "TFLOP/s")
        findings.add(label, "over bf16", 1 / timing.ratio, "x")


def cases(setting: Setting) -> list[Case]:
    shapes = SHAPES[:2] if setting.quick else SHAPES
    if setting.toy:
        shapes = tuple((m // 128, n // 128, k // 128) for m, n, k in shapes)
    timed = [Case(str(shape), lambda s, findings, shape=shape: rates(shape, s, findings)) for shape in shapes]
    return [Case("errors", errors), *timed]


SECTION = Section(
    name="gemms",
    title="GEMMs of quantized operands",
    notes=(
        "[m, k] @ [n, k].T, operands quantized beforehand; in parentheses the implementation that runs. The result is "
        "bf16 unless it says otherwise. Errors are the relative RMS of a float32 result, from float64, at "
        "1024 x 1536 x 4096. Pairs of operands that two GEMMs share are named after the first."
    ),
    seconds=50,
    cases=cases,
)
