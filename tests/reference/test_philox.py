"""Philox: the published known answers, and the counter from an element's position and its tensor."""

import numpy as np
import pytest

from quaver.reference.numerics import philox2x32, philox4x32, uniform
from tests.close import assert_bitwise

ONES = 0xFFFFFFFF
#: Counter, key, words: from the known-answer file of Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


#: The same of two words.
KNOWN_OF_TWO = [
    ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
    ((ONES,) * 2, ONES, (0x2C3F628B, 0xAB4FD7AD)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_OF_TWO)
def test_known_answers_of_two(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    assert_bitwise(philox2x32(tuple(np.array([c]) for c in counter), key), np.array([words], np.uint32))


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_an_elements_number_depends_on_its_place_in_the_operand() -> None:
    rows, k, seed, tensor_id, count = 5, 7, 0x123456789ABCDEF0, 0xCAFE, 3
    got = uniform(rows, k, seed, tensor_id, count)
    key, upper, _, _ = philox4x32((0, 0, tensor_id, count), (0x9ABCDEF0, 0x12345678))
    for place in range(rows * k):
        words = philox2x32((np.array(place >> 2), np.array(upper)), key)
        half = int(words[(place & 3) >> 1]) >> (0 if place & 1 else 16) & 0xFFFF
        expected = np.float32((half + 0.5) * 2.0**-16)
        assert got.flat[place] == expected, f"element {divmod(place, k)}: {got.flat[place]}, expected {expected}"


def test_numbers_are_the_centres_of_2_to_the_16_cells_of_the_unit_interval() -> None:
    u = uniform(64, 64, seed=1, tensor_id=2, count=3).astype(np.float64)
    assert u.min() >= 2.0**-17 and u.max() <= 1 - 2.0**-17
    assert ((u * 2**16 - 0.5) == np.floor(u * 2**16)).all()
    assert abs(u.mean() - 0.5) < 3 * np.sqrt(1 / 12 / u.size)


@pytest.mark.parametrize("other", [{"seed": 1}, {"seed": 1 << 32}, {"tensor_id": 1}, {"count": 1}], ids=str)
def test_seed_tensor_and_count_each_give_another_stream(other: dict[str, int]) -> None:
    same = {"seed": 0, "tensor_id": 0, "count": 0}
    assert not np.isin(uniform(8, 8, **same | other), uniform(8, 8, **same)).all()
    assert_bitwise(uniform(8, 8, **same), uniform(8, 8, **same))


def test_only_the_low_word_of_the_count_enters() -> None:
    assert_bitwise(uniform(3, 3, 0, 0, (7 << 32) + 5), uniform(3, 3, 0, 0, 5))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_an_empty_operand_draws_nothing(shape: tuple[int, int]) -> None:
    assert uniform(*shape, 0, 0, 0).shape == shape
