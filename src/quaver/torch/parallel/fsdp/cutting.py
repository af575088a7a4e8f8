"""Where the blocks of a weight [N, K] lie whose rows are dealt out to ranks, as torch's chunks are: pure arithmetic.

A block within one rank's rows is quantized there as in the whole weight. One that lies on several ranks, which
straddles, needs the amax of all its parts, and nothing else. Where tensor parallelism has cut the weight before, [N, K]
is this rank's part of it, and what it cut through are blocks as high or as wide as the weight, no others.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from quaver.core.spec import QuantSpec, Recipe


@dataclass(frozen=True)
class Side:
    """One operand that a weight [N, K] becomes: fprop's, or dgrad's, which is the transpose and lies as the weight."""

    #: "fprop" or "dgrad".
    name: str
    spec: QuantSpec
    #: Whether the operand is the transpose.
    turned: bool = field(init=False)
    #: Rows of the weight in a block; None for all.
    height: int | None = field(init=False)
    #: Columns of the weight in a block; None for all.
    width: int | None = field(init=False)

    def __post_init__(self) -> None:
        turned = self.name == "dgrad"
        height, width = self.spec.block[::-1] if turned else self.spec.block
        for name, value in (("turned", turned), ("height", height), ("width", width)):
            object.__setattr__(self, name, value)

    def columns(self, k: int) -> int:
        """Columns that are stored of K."""
        return k if self.turned else self.spec.padded(k)

    def blocks(self, k: int) -> int:
        """Blocks along K."""
        return 1 if self.width is None else -(-self.columns(k) // self.width)


def sides(recipe: Recipe) -> tuple[Side, ...]:
    """The operands of a recipe's weight: one where fprop's serves dgrad."""
    assert recipe.fprop.b is not None and recipe.dgrad.b is not None
    first = Side("fprop", recipe.fprop.b)
    return (first,) if recipe.plan.weight else (first, Side("dgrad", recipe.dgrad.b))


class Rows(NamedTuple):
    """The rows of a weight that a rank has."""

    start: int
    stop: int
    #: Of the whole weight.
    all: int
    #: That every rank's part is filled up to.
    part: int
    ranks: int
    #: The axis along which tensor parallelism has cut the weight of which this one is a part; None where it has not.
    axis: int | None = None

    @classmethod
    def of(cls, n: int, ranks: int, rank: int, axis: int | None = None) -> "Rows":
        return cls(0, 0, n, -(-n // ranks), ranks, axis).on(rank)

    @property
    def has_others(self) -> bool:
        """Whether other ranks have the rest of a block that is as high as the weight."""
        return self.ranks > 1 or self.axis is not None

    def on(self, rank: int) -> "Rows":
        """Those of another rank."""
        start = min(self.all, self.part * rank)
        return self._replace(start=start, stop=min(self.all, start + self.part))


class Piece(NamedTuple):
    """Rows of one rank that are whole blocks, or a part of one."""

    start: int
    stop: int
    #: The row of blocks that it begins in.
    block: int
    straddles: bool


def pieces(rows: Rows, height: int | None) -> list[Piece]:
    """A rank's rows, cut where a row of blocks begins that lies on another rank too, or ends."""
    start, stop = rows.start, rows.stop
    if start == stop:
        return []
    if height is None:
        return [Piece(start, stop, 0, rows.has_others)]
    first = min(stop, -(-start // height) * height)
    last = stop if stop == rows.all else max(first, stop // height * height)
    cuts = sorted({start, first, last, stop})
    return [Piece(a, b, a // height, a % height != 0 or (b % height != 0 and b != rows.all)) for a, b in pairwise(cuts)]


def cut_across(rows: Rows, side: Side) -> bool:
    """Whether tensor parallelism has cut through all rows of blocks, on whose amaxes ranks with the same rows agree."""
    return rows.axis == 1 and side.width is None and side.height is not None


def straddling(rows: Rows, height: int | None) -> list[int]:
    """The rows of blocks of the whole weight that lie on several ranks."""
    if height is None:
        # Ranks without rows, too: its scales do not travel.
        return [0] if rows.has_others else []
    if rows.part >= rows.all:
        return []
    return sorted({cut // height for cut in range(rows.part, rows.all, rows.part) if cut % height})


def block_rows(rows: Rows, height: int) -> range:
    """The rows of blocks that a rank has something of."""
    return range(rows.start // height, -(-rows.stop // height)) if rows.stop > rows.start else range(0)


def most_block_rows(rows: Rows, height: int) -> int:
    """The most of them that any rank has."""
    return max(len(block_rows(rows.on(rank), height)) for rank in range(rows.ranks))
