"""Rows that lie group by group: where each group ends, and one side of grouped GEMMs, quantized."""

from collections.abc import Sequence

from torch import Tensor

from quaver.torch.numerics.quantized import Quantized


class Offsets:
    """Where groups of rows end: on the device, and on the host after the first call of `bounds`, which waits for it."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        self.ends = ends
        self.rows = rows
        self._bounds: list[tuple[int, int]] | None = None

    @property
    def groups(self) -> int:
        return self.ends.shape[0]

    def bounds(self) -> list[tuple[int, int]]:
        """(first row, row after the last) of each group.

        Raises:
            ValueError: offsets that do not ascend from 0 to at most the number of rows.
        """
        if self._bounds is None:
            ends = self.ends.tolist()
            starts = [0, *ends][: len(ends)]
            if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > self.rows):
                raise ValueError(
                    f"offsets are the ends of the groups among {self.rows} rows, ascending; these are {ends}: give "
                    "group_sizes.cumsum(0)"
                )
            self._bounds = list(zip(starts, ends, strict=True))
        return self._bounds


class Groups:
    """One side of grouped GEMMs, quantized."""

    __slots__ = ("parts", "rows", "whole")

    def __init__(self, whole: Quantized | None, parts: Sequence[Quantized | None], rows: int = 0) -> None:
        #: All groups' rows, or None where each group is quantized by itself.
        self.whole = whole
        #: Of each group, None where it has no rows; empty beside `whole`.
        self.parts = parts
        #: Of every group, where they are alike: an expert's weight.
        self.rows = rows

    def of(self, group: int, bounds: tuple[int, int] | None = None) -> Quantized | None:
        """One group's operand, None of nothing; of rows that lie together those within the bounds, or a weight's."""
        if self.whole is not None:
            return rows_of(self.whole, *(bounds or (group * self.rows, (group + 1) * self.rows)))
        return self.parts[group]


def rows_of(q: Quantized, start: int, end: int) -> Quantized:
    """Some rows of an operand, in the same memory; where scales are of several rows, whole blocks of them."""
    assert not q.turned
    height = q.spec.block[0]
    assert height is not None and isinstance(q.scale, Tensor)
    scale = q.plain_scale()[start // height : -(-end // height)]
    return Quantized(q.data[start:end], scale, q.spec, (end - start, q.shape[1]), tensor_factor=q.tensor_factor)
