"""The choice of cases leaves no pair of values out."""

from itertools import combinations, product

import pytest

from tests.pairs import alternating, pairs


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 2), (2, 2, 5), (9, 3, 2), (2, 2, 2, 2), (4, 3, 2, 2)])
def test_every_pair_of_values_occurs_and_no_row_repeats(sizes: tuple[int, ...]) -> None:
    values = [[(parameter, value) for value in range(size)] for parameter, size in enumerate(sizes)]
    rows = pairs(*values)
    assert len(set(rows)) == len(rows) and set(rows) <= set(product(*values))
    for first, second in combinations(values, 2):
        assert all(any(a in row and b in row for row in rows) for a, b in product(first, second))
    assert {value for row in rows for value in row} == {value for parameter in values for value in parameter}


def test_three_parameters_take_as_many_rows_as_the_larger_two() -> None:
    assert len(pairs(range(5), range(2), range(2))) == 10
    assert len(pairs(range(9), range(3), "ab")) == 27


def test_turns_have_every_value_and_whole_ones_all_pairs() -> None:
    rows = alternating("abcd", (1, 2), "b")
    assert rows == [("a", 1), ("b", 1), ("b", 2), ("c", 1), ("d", 2)]
    both = {*rows, *alternating("abcd", (1, 2), "b", 1)}
    assert both == set(product("abcd", (1, 2)))
