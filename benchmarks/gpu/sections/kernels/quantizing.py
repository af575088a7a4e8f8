"""Quantization kernels: compared bit by bit with the reference, then timed against the time of copying their bytes."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measuring import card
from benchmarks.gpu.measuring.clock import interleave
from benchmarks.gpu.measuring.setting import Case, Findings, Section, Setting
from benchmarks.gpu.sections.kernels.ceilings import copy_rate
from quaver.costs import ledger
from quaver.costs.ledger import QuantizedCopy
from quaver.recipes import RECIPES
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations import ops

#: Shapes of compared operands, of whole blocks and ragged.
COMPARED, TOY = ((1024, 768), (1000, 776)), ((36, 72),)
#: Shapes of timed operands: the first is so large that start and end of the kernel do not matter; the second is a
#: layer's.
TIMED, TOY_TIMED = ((16_384, 8192), (8192, 4096)), ((32, 48),)
#: Noise of an operand and of its transpose: (seed, tensor id, count).
NOISE, OTHER_NOISE = (0, 1, 0), (0, 2, 0)


@dataclass(frozen=True)
class Work:
    """A tensor and its quantization under a recipe."""

    copies: tuple[QuantizedCopy, ...]
    delayed: bool

    def run(self, x: Tensor) -> tuple[Quantized, ...]:
        """Quantize with the kernels, as layers call them."""
        factor = torch.full((1,), 4.0, device=x.device) if self.delayed else None
        return self.on(x, factor)

    def on(self, x: Tensor, factor: Tensor | None) -> tuple[Quantized, ...]:
        if len(self.copies) == 2:
            plain, transposed = (copy.spec for copy in self.copies)
            both = ops.QUANTIZE_BOTH(x, plain, transposed, None, factor, NOISE, OTHER_NOISE, self.delayed)
            return tuple(both)
        (copy,) = self.copies
        return (kernel()(x.t() if copy.transposed else x, copy.spec, None, factor, NOISE, self.delayed),)

    def expected(self, x: Tensor) -> tuple[Quantized, ...]:
        """Quantize with the reference."""
        factor = 4.0 if self.delayed else None
        noises = NOISE, OTHER_NOISE
        return tuple(
            reference.quantize(x.t() if copy.transposed else x, copy.spec, None, factor, noise)
            for copy, noise in zip(self.copies, noises, strict=False)
        )

    def reason_unsupported(self, x: Tensor) -> str:
        """Return why there is no kernel for it, or ""."""
        impl = next(i for i in ops.QUANTIZE.implementations if i.name == "triton")
        return next((why for c in self.copies if (why := impl.reason(x, c.spec, None, None, NOISE))), "")


def kernel() -> Callable[..., Quantized]:
    return next(impl.run for impl in ops.QUANTIZE.implementations if impl.name == "triton")


def works() -> dict[str, Work]:
    """Every distinct one by "recipe tensor", named after the first recipe that has it; inputs of all recipes first, so
    that a run that is cut has seen each recipe."""
    gpu = card.nearest()
    labels: dict[Work, str] = {}
    for name, build in RECIPES.items():
        recipe = build()
        for tensor, copies in ledger.copies(recipe, gpu).items():
            if copies:
                labels.setdefault(Work(tuple(copies), recipe.delayed is not None), f"{name} {tensor}")
    order = ("input", "grad_output", "weight")
    by_tensor = sorted(labels.items(), key=lambda item: order.index(item[1].split()[1]))
    return {label: work for work, label in by_tensor}


def operands(shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    """Return difficult bf16 values by name."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(shape, generator=generator)
    wide = normal * torch.exp2(torch.randint(-60, 60, shape, generator=generator).float())
    hard = {"normal": normal, "wide": wide, "zeros": torch.zeros(shape), "subnormal": normal * 1e-39}
    for name, value in {"NaN": math.nan, "infinity": math.inf, "outlier": 3e38}.items():
        hard[name] = normal.clone()
        hard[name][shape[0] // 2, shape[1] // 3] = value
    return {name: x.to(torch.bfloat16).to(device) for name, x in hard.items()}


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty return NaN and 255, so that unwritten elements are detected."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def differing(quantized: Quantized, expected: Quantized) -> int:
    """Count codes and scales that differ; NaN equals NaN."""
    total = 0
    for ours, theirs in ((quantized.codes(), expected.codes()), (quantized.scales(), expected.scales())):
        if ours.shape != theirs.shape:
            raise ValueError(f"{tuple(ours.shape)} where the reference has {tuple(theirs.shape)}")
        total += int(((ours != theirs) & ~((ours != ours) & (theirs != theirs))).sum())
    return total


def compare(name: str, work: Work, setting: Setting, findings: Findings) -> None:
    """Add the number of a kernel's wrong elements."""
    wrong, where = 0, []
    for shape in TOY if setting.toy else COMPARED:
        for kind, x in operands(shape, setting.device).items():
            if (setting.toy or setting.hollow) and kind != "NaN":
                continue
            with poisoned():
                quantized = work.run(x)
            each = [differing(q, r) for q, r in zip(quantized, work.expected(x), strict=True)]
            wrong += sum(each)
            if sum(each):
                where.append(f"{kind} {shape}: {each}")
    findings.add(name, "differing", wrong, "elements")
    if where and not setting.hollow:
        findings.failures.append(f"{name}: differs from the reference: {'; '.join(where[:3])}")


def measured(name: str, work: Work) -> Callable[[Setting, Findings], None]:
    """Return the function of a case that compares and then times."""

    def measure(setting: Setting, findings: Findings) -> None:
        with setting.kernels():
            compare(name, work, setting, findings)
            factor = torch.full((1,), 4.0, device=setting.device) if work.delayed else None
            for shape in TOY_TIMED if setting.toy else TIMED[:1] if setting.quick else TIMED:
                subject = f"{name}, {shape[0]} x {shape[1]}"
                step = rotating(shape, setting, lambda x: work.on(x, factor))
                timings = interleave({subject: step}, setting, findings)
                moved = ledger.quantization(work.copies, *shape, card.nearest(), delayed=work.delayed).bytes
                for timing in timings.values():
                    report(subject, moved, timing.seconds, setting, findings)

    return measure


def report(subject: str, moved: float, seconds: float, setting: Setting, findings: Findings) -> None:
    """Add the rate at which necessary bytes are moved, and the fraction of the time that copying them takes."""
    findings.add(subject, "time", seconds * 1e6, "µs")
    findings.add(subject, "rate", moved / seconds / 1e12, "TB/s")
    findings.add(subject, "of the floor", 100 * moved / seconds / copy_rate(setting), "%")


def rotating(shape: tuple[int, int], setting: Setting, run: Callable[[Tensor], Any]) -> Callable[[], None]:
    """Return a step that cycles through so many inputs that none is still in the caches when it is used again."""
    number = 2 if setting.toy or setting.hollow else 5
    inputs = itertools.cycle([torch.randn(shape, dtype=torch.bfloat16, device=setting.device) for _ in range(number)])

    def step() -> None:
        run(next(inputs))

    return step


def cases(setting: Setting) -> list[Case]:
    """Return a case for all that has a kernel."""
    x = torch.ones((32, 32), dtype=torch.bfloat16, device=setting.device)
    with setting.kernels():
        return [Case(name, measured(name, work)) for name, work in works().items() if not work.reason_unsupported(x)]


SECTION = Section(
    name="kernels",
    title="Quantization kernels, from bf16",
    notes=(
        "Each tensor of a recipe into all the copies that its GEMMs ask for. `differing`: codes and scales that are "
        "not the reference's, over values that hurt, on poisoned outputs. The floor is the time that the counted bytes "
        "(`core.costs.ledger`) take at the rate of a large copy; inputs rotate, so that none is in the caches. Work "
        "that two recipes share is named after the first; what no kernel writes is left out."
    ),
    seconds=60,
    cases=cases,
)
