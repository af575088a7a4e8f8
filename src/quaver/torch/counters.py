"""How many values of each operand saturated, were flushed to zero or were not finite. Off, and then free, by default."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quaver.torch.hadamard import rotate
from quaver.torch.quantized import Quantized, spread


@dataclass
class Counts:
    """Of one operand of one layer, over everything quantized while counting."""

    elements: int = 0
    #: Stored as the largest magnitude though larger.
    saturated: int = 0
    #: Stored as zero though not zero.
    flushed: int = 0
    #: Infinities and NaN.
    nonfinite: int = 0


class Counters:
    """Counts by layer and operand ("input", "weight", "grad_output", and with ".T" for a second copy along tokens)."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self.table: dict[str, dict[str, Counts]] = defaultdict(lambda: defaultdict(Counts))

    def note(self, layer: nn.Module, operand: str, x: Tensor, q: Quantized) -> None:
        name = self._names.get(id(layer))
        if name is None:
            return
        counts = self.table[name][operand]
        exact = x.detach().to(torch.float32)
        if q.spec.hadamard:
            exact = rotate(exact)
        exact = exact.abs()
        finite = exact.isfinite()
        largest = q.spec.format.max * spread(q.scales(), q.spec.block, q.shape)
        counts.elements += exact.numel()
        counts.saturated += int((finite & (exact > largest)).sum())
        counts.flushed += int((finite & (exact > 0) & (q.values() == 0)).sum())
        counts.nonfinite += int((~finite).sum())

    def __str__(self) -> str:
        rows = [f"{'layer':<40}{'operand':<16}{'elements':>12}{'saturated':>12}{'flushed':>12}{'non-finite':>12}"]
        for layer, operands in self.table.items():
            for operand, c in operands.items():
                rows.append(
                    f"{layer or '(root)':<40}{operand:<16}{c.elements:>12}{c.saturated:>12}{c.flushed:>12}{c.nonfinite:>12}"
                )
        return "\n".join(rows)


class _Active:
    counters: Counters | None = None


active = _Active()


@contextmanager
def count(model: nn.Module) -> Iterator[Counters]:
    """Count while this is open, in eager mode: `with count(model) as c: step(); print(c)`."""
    before = active.counters
    active.counters = Counters(model)
    try:
        yield active.counters
    finally:
        active.counters = before
