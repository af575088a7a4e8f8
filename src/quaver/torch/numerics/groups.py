"""Rows that lie group by group: where each group ends and its rows lie, and operands of grouped GEMMs.

group    [7 rows][][23 rows]          ends 7, 7, 30
slots    [7 rows 9 free][][23 rows 9 free]    where each group begins at a multiple of 16
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.numerics.quantized import Quantized


class Offsets:
    """Where groups of rows end: on the device, and on the host after the first call of `bounds`, which waits for it."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        self.ends = ends
        self.rows = rows
        self._bounds: list[tuple[int, int]] | None = None
        self._slots: dict[int, Slots] = {}

    @property
    def groups(self) -> int:
        return self.ends.shape[0]

    def bounds(self) -> list[tuple[int, int]]:
        """(first row, row after the last) of each group.

        Raises:
            ValueError: offsets that do not ascend from 0 to at most the number of rows.
        """
        if self._bounds is None:
            # On meta there are none, and shapes do not depend on it.
            ends = [0] * self.groups if self.ends.is_meta else self.ends.tolist()
            starts = [0, *ends][: len(ends)]
            if any(start > end for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > self.rows):
                raise ValueError(
                    f"offsets are the ends of the groups among {self.rows} rows, ascending; these are {ends}: give "
                    "group_sizes.cumsum(0)"
                )
            self._bounds = list(zip(starts, ends, strict=True))
        return self._bounds

    def slots(self, multiple: int) -> "Slots":
        """The rows where each group begins at a multiple of so many slots; nothing waits for the device."""
        slots = self._slots.get(multiple)
        if slots is None:
            slots = self._slots[multiple] = Slots(self.ends, self.rows, multiple)
        return slots


class Slots:
    """Rows of groups in slots, of which each group has a multiple of some number, the last ones of it free.

    How many slots there are depends on the numbers of rows and of groups alone. All else is computed on the device.
    """

    def __init__(self, ends: Tensor, rows: int, multiple: int) -> None:
        self.multiple, self.rows, self.groups = multiple, rows, ends.shape[0]
        self.count = slots(rows, self.groups, multiple)
        self._ends = ends

    @cached_property
    def sizes(self) -> Tensor:
        """Rows of each group: int64 [groups]."""
        return torch.diff(self._ends, prepend=self._ends.new_zeros(1)).long()

    @cached_property
    def filled(self) -> Tensor:
        """Slots of each group: int64 [groups]."""
        return (self.sizes + (self.multiple - 1)) // self.multiple * self.multiple

    @cached_property
    def ends(self) -> Tensor:
        """Where each group's slots end: int32 [groups]."""
        return self._ends if self.multiple == 1 else self.filled.cumsum(0, dtype=torch.int32)

    @cached_property
    def group(self) -> Tensor:
        """The group of each slot, the number of groups for one of none: int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int32, device=self._ends.device)
        return torch.searchsorted(self.ends, at, right=True)

    @cached_property
    def place(self) -> Tensor:
        """The place of each slot in its group, anything in one of none: int64 [slots]."""
        at = torch.arange(self.count, dtype=torch.int64, device=self._ends.device)
        return at - of_groups(self.ends - self.filled, self.group)

    @cached_property
    def row(self) -> Tensor:
        """The row of each slot, the number of rows in a free one: int64 [slots]."""
        first = (self._ends - self.sizes).long()
        taken = (self.group < self.groups) & (self.place < of_groups(self.sizes, self.group))
        return torch.where(taken, of_groups(first, self.group) + self.place, self.rows)

    def take(self, x: Tensor) -> Tensor:
        """Rows [rows, k] in their slots, zeros in free ones: [slots, k]."""
        if self.multiple == 1:
            return x.masked_fill((self.group == self.groups).unsqueeze(1), 0)
        if self.rows == 0:
            return x.new_zeros((self.count, *x.shape[1:]))
        free = self.row == self.rows
        return x.index_select(0, self.row.clamp(max=self.rows - 1)).masked_fill_(free.unsqueeze(1), 0)


def slots(rows: int, groups: int, multiple: int) -> int:
    """Slots that suffice for rows of groups, however they are distributed."""
    return rows if multiple == 1 else (rows + groups * (multiple - 1)) // multiple * multiple


def of_groups(numbers: Tensor, group: Tensor) -> Tensor:
    """What belongs to the group of each slot, of numbers [groups, ...]; 0 where there is none."""
    none = numbers.new_zeros((1, *numbers.shape[1:]))
    return torch.cat([numbers, none]).index_select(0, group)


@dataclass(slots=True, eq=False)
class Laid:
    """An operand of each group, all in one tensor on one device, without a word from the host of how many rows each
    has.

    Blocks of it are of one group: along rows or tokens, whichever is divided by group, they are `segments`.
    """

    #: Rows that are summed over k, [slots, k]; or if `summed` transposes that are summed over slots, [k, slots]. Codes
    #: of four bits are two to a byte along what is summed over.
    data: Tensor
    #: Stored scales, [segments, blocks of k] in either case.
    scale: Tensor
    #: Of two-level scales what those of a group are divided by: float32 [groups, 1].
    factor: Tensor | None
    spec: QuantSpec
    #: Whether products sum over slots.
    summed: bool
    slots: Slots
    #: Codes that are summed over.
    k: int
    #: Largest magnitude of each group, float32 [groups], where one scale serves it.
    amax: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and codes that are summed over."""
        return self.data.shape[0], self.k


class Stack:
    """The weights of all groups, an operand [rows, k] of each, None before it is asked for: a group without tokens may
    never be."""

    __slots__ = ("amax", "parts", "unread", "whole")

    def __init__(self, parts: Sequence[Quantized | None], whole: Quantized | None = None) -> None:
        self.parts = list(parts)
        #: Of each group beside `whole`, float32 [groups], where one scale serves it.
        self.amax: Tensor | None = None
        #: On a GPU all of them at once, the rows of one below those of another, each with scales of its own: blocks of
        #: one row.
        self.whole = whole
        #: Groups whose parts were made beside those of others and have not been multiplied yet, nor counted.
        self.unread: set[int] = set()


def in_lines(t: Tensor) -> bool:
    """Whether rows, or columns, begin at multiples of 16 bytes, as torch's grouped GEMMs want them."""
    line, rows, columns = 16 // t.element_size(), t.stride(-2), t.stride(-1)
    apart, features = (rows, t.shape[-1]) if columns == 1 else (columns, t.shape[-2])
    return 1 in (rows, columns) and apart >= features and apart % line == 0 and t.data_ptr() % 16 == 0


def rows_of(q: Quantized, start: int, end: int) -> Quantized:
    """Some rows of an operand, in the same memory; where scales are of several rows, whole blocks of them."""
    assert not q.turned
    height, scale = q.spec.block[0], q.scale
    if isinstance(scale, Tensor) and height is not None:
        scale = q.plain_scale()[start // height : -(-end // height)]
    return Quantized(q.data[start:end], scale, q.spec, (end - start, q.shape[1]), tensor_factor=q.tensor_factor)


# What waits for backward on a CPU, where each group has an operand of its own.


def dtype_of_scales(spec: QuantSpec) -> torch.dtype:
    """As which stored scales of an operand wait for backward on a CPU: those that are powers of two as their exponent,
    since of few tokens a group has many, and a float32 for each 16 elements is a fifth of what is kept.

    Exact: float8_e8m0fnu has all that are stored as powers of two: 2**-127 to 2**126, and NaN.
    """
    if spec.scale == "power_of_two" and not spec.per_tensor:
        return torch.float8_e8m0fnu
    return torch.uint8 if spec.scale == "e8m0" or spec.two_level else torch.float32


class Waiting(NamedTuple):
    """What `put_groups_together` needs beside tensors."""

    spec: QuantSpec
    #: Of each group its operand's shape and whether it lies as its transpose; None of one without tokens.
    parts: Sequence[tuple[tuple[int, int], bool] | None]
    #: Whether scales lie as those of transposes.
    turned: bool
    #: Along which dimension scales are one group's after another's, and how many of it each has.
    dim: int
    sizes: list[int]


def take_groups_apart(parts: Sequence[Quantized | None]) -> tuple[list[Tensor | None], Waiting] | None:
    """Operands of one spec as tensors: all scales in one, uint8, and the codes of each group; None where scales wait as
    they are stored."""
    full = [q for q in parts if q is not None]
    if not full or dtype_of_scales(full[0].spec) is not torch.float8_e8m0fnu:
        return None
    # All as the first lies: a transpose of one token may lie in another way than those of several.
    turned = full[0].turned
    scales: list[Any] = [q.scale if q.turned is turned else q.scale.t() for q in full]  # type: ignore[union-attr]
    shapes = [scale.shape for scale in scales]
    # k by blocks of tokens, or blocks of tokens by blocks of k: one side is the same of all.
    dim = 0 if all(shape[1] == shapes[0][1] for shape in shapes) else 1
    # One call for all groups: of some for each the calls would take longer than the copies.
    codes = torch.cat(scales, dim).to(torch.float8_e8m0fnu).view(torch.uint8)
    places = [None if q is None else (q.shape, q.turned) for q in parts]
    layout = Waiting(full[0].spec, places, turned, dim, [shape[dim] for shape in shapes])
    return [codes, *(None if q is None else q.data for q in parts)], layout


def put_groups_together(tensors: Sequence[Tensor | None], layout: Waiting) -> list[Quantized | None]:
    """What `take_groups_apart` took apart, with scales in float32."""
    codes, *data = tensors
    assert codes is not None
    spec, places, all_turned, dim, sizes = layout
    scales = iter(codes.view(torch.float8_e8m0fnu).to(torch.float32).split(sizes, dim))
    parts: list[Quantized | None] = []
    for t, of in zip(data, places, strict=True):
        if t is None or of is None:
            parts.append(None)
            continue
        shape, turned = of
        scale = next(scales)
        parts.append(Quantized(t, scale if turned is all_turned else scale.t(), spec, shape, turned))
    return parts
