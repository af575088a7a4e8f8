"""`count`: values per operand that saturated, were flushed to zero, or were not finite, in the steps of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from quaver.inspection.counts import CountTable
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance
from quaver.torch.inspection.statistics import operand_statistics
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state.observer import Observer, observing
from quaver.torch.state.weight_cache import refresh


class Counters(CountTable, Observer):
    """Counts by layer and operand: "input", "weight", "grad_output", and with ".T" their transposes for other GEMMs.

    An operand that two GEMMs share is counted once. Compiled layers are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}

    def observe_operand(
        self, layer: nn.Module, recipe: Recipe, operand: str, x: Tensor, q: Quantized, parameter: str = "weight"
    ) -> None:
        """Count one operand; see `quaver.torch.state.observer.Observer`."""
        name = self._names.get(id(layer))
        if name is None or is_tracing():
            return
        if parameter != "weight":
            name = f"{name}.{parameter}".lstrip(".")
        self.table[name][operand].add(operand_statistics(x, q))


@contextmanager
def count(model: nn.Module) -> Iterator[Counters]:
    """Count while the context is open, in eager mode: `with count(model) as counters: step()`, then `print(counters)`.

    A weight is counted each time it is quantized; cached weights are dropped at the start.
    """
    check_instance("count", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    refresh(model)
    counters = Counters(model)
    with observing(counters):
        yield counters
