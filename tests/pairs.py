"""Select fewer cases than the full product of parameters."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of a product such that every pair of values of two parameters occurs, chosen greedily and reproducibly.

    Args:
        parameters: the values of each.
    """
    lists = [list(values) for values in parameters]
    rows = list(product(*(range(len(values)) for values in lists)))
    pairs_of_row = {row: _pairs(row) for row in rows}
    left = set().union(*pairs_of_row.values())
    chosen = []
    while left:
        row = max(rows, key=lambda row: len(left & pairs_of_row[row]))
        left -= pairs_of_row[row]
        chosen.append(row)
    return [tuple(values[i] for values, i in zip(lists, row, strict=True)) for row in sorted(chosen)]


def alternating(
    ones: Iterable[Any], others: Iterable[Any], whole: Iterable[Any], first: int = 0
) -> list[tuple[Any, Any]]:
    """Rows of two parameters: values of `ones` alternate between `others`, those of `whole` occur with each.

    Args:
        first: the first of the others; tests of one subject start with different ones, so that together they have all
            pairs.
    """
    others, whole = list(others), set(whole)
    rows = []
    for number, one in enumerate(ones):
        rows += [
            (one, other) for at, other in enumerate(others) if one in whole or (number + first - at) % len(others) == 0
        ]
    return rows


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(row), 2)) if len(row) > 1 else {tuple(enumerate(row))}


def case_name(value: Any) -> str:
    """The name of a value in a test id: that of a function or class, else its text."""
    return str(getattr(value, "__name__", value))
