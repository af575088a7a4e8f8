"""The cards that this machine can pass for, by architecture."""

import re
from typing import NamedTuple


class Card(NamedTuple):
    """Properties that a GPU reports."""

    name: str
    multiprocessors: int


CARDS = {
    80: Card("NVIDIA A100-SXM4-80GB", 108),
    86: Card("NVIDIA A40", 84),
    89: Card("NVIDIA L40S", 142),
    90: Card("NVIDIA H200", 132),
    100: Card("NVIDIA B200", 148),
    120: Card("NVIDIA GeForce RTX 5090", 170),
}


def architecture(text: str) -> int:
    """sm_90 as a number. Raises: ValueError for what is no architecture, and for one without a card here."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)a?", text)
    if match is None:
        raise ValueError(f"no architecture {text!r}; write it as sm_90")
    arch = int(match.group(1))
    if arch not in CARDS:
        known = ", ".join(f"sm_{one}" for one in CARDS)
        raise ValueError(f"no card to compile for has the architecture {text!r}; choose from {known}")
    return arch
