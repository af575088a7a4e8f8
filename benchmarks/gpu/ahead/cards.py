"""GPUs that this machine can simulate, by architecture."""

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
    """Return the number of an architecture, such as 90 for sm_90. Raises: ValueError for an unknown one."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)a?", text)
    if match is None:
        raise ValueError(f"no architecture {text!r}; write it as sm_90")
    arch = int(match.group(1))
    if arch not in CARDS:
        known = ", ".join(f"sm_{one}" for one in CARDS)
        raise ValueError(f"no card to compile for has the architecture {text!r}; choose from {known}")
    return arch
