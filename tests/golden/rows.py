"""A choice of cases that a new recipe leaves as it is."""

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any
from zlib import crc32


def rows(names: Iterable[str], *others: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of a product: each name with every value of each other parameter, and all pairs of those at least once.

    A name's rows depend on the name alone; pairs that no name has follow with the first one.
    """
    names, lists = list(names), [list(values) for values in others]
    if len(lists) < 2:
        yield from product(names, *lists)
        return
    left = {(i, a, j, b) for (i, x), (j, y) in combinations(enumerate(lists), 2) for a in x for b in y}
    longest = max(map(len, lists))
    for name in names:
        for number in range(longest):
            places = [(number + crc32(f"{name} {at}".encode())) % len(values) for at, values in enumerate(lists)]
            row = [values[place] for values, place in zip(lists, places, strict=True)]
            left -= {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(row), 2)}
            yield name, *row
    for i, a, j, b in sorted(left, key=str):
        row = [values[0] for values in lists]
        row[i], row[j] = a, b
        yield names[0], *row
