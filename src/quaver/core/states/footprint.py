"""Bytes that training keeps of a matrix by a preset: its weight, what is beside it, its gradient, its moments."""

from dataclasses import dataclass

from quaver.core.spec import QuantSpec
from quaver.core.states.codes import StateSpec
from quaver.core.states.presets import Preset

#: Tensors below are kept in float32, if they are no codes.
SMALL = 4096
_BESIDE = {"none": 0, "residual8": 1, "residual16": 2, "remainder": 2, "float16": 2, "float32": 4}
_FLOATS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a matrix, or of a whole model."""

    weight: int
    #: Master, residual or remainder.
    beside: int
    gradient: int
    moments: int

    @property
    def total(self) -> int:
        return self.weight + self.beside + self.gradient + self.moments

    @property
    def moved(self) -> int:
        """Bytes that a step in one pass moves: all is read, and all but the gradient is written."""
        return 2 * self.total - self.gradient

    def __add__(self, other: "Footprint") -> "Footprint":
        own, its = (tuple(vars(each).values()) for each in (self, other))
        return Footprint(*(a + b for a, b in zip(own, its, strict=True)))


NOTHING = Footprint(0, 0, 0, 0)


def plain(number: int, moments: int = 2) -> Footprint:
    """Of so many elements, all in float32."""
    return Footprint(4 * number, 0, 4 * number, 4 * number * moments)


def of_matrix(
    preset: Preset, shape: tuple[int, int], kept: str, spec: QuantSpec | None = None, moments: int = 2
) -> Footprint:
    """Of a matrix [rows, k].

    Args:
        kept: what its weight is: "codes", "bfloat16" or "float32".
        spec: of codes.
        moments: 2 of Adam, 1 of Lion and of SGD with momentum.
    Exact, but for the counts of steps and the amaxes that predict scales: four bytes a matrix, or a block.
    """
    number = shape[0] * shape[1]
    beside = 0
    if kept == "codes":
        assert spec is not None
        rows, columns = spec.blocks(*shape)
        weight = number + rows * columns * (1 if spec.scale == "e8m0" else 4)
        beside = number * _BESIDE[preset.codes] + (4 if preset.codes == "float16" else 0)
    else:
        weight = number * _FLOATS[kept]
        beside = number * _BESIDE[preset.bfloat16] if kept == "bfloat16" else 0
    specs = (preset.first, preset.second)[:moments]
    held = preset.gradient
    if isinstance(held, StateSpec):
        gradient = held.bytes(shape)
    else:
        gradient = number * min(_FLOATS[held], _FLOATS.get(kept, 4))
    return Footprint(weight, beside, gradient, sum(each.bytes(shape) for each in specs))
