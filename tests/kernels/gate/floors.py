"""What each kernel cannot go below on a card, by its bytes and by its instructions: the table of docs/performance.md.

    floor    bytes of its tensors / copy rate
    share    what the card can issue / instructions a byte / copy rate

of which the second is the highest part of the copy rate that a kernel can reach. A card issues one instruction of a
warp of 32 threads in each of a multiprocessor's four parts at every cycle, which no kernel quite does; what takes some
units several cycles, such as exponentials, is counted as one. Below 100 % the instructions are what a kernel waits for.

`python -m tests.kernels.gate.floors` writes the table from the figures of ceilings.toml; a test compares them.
"""

import re
from pathlib import Path
from typing import NamedTuple

from quaver.core.costs.gpus import GPUS
from tests.kernels.gate import ceilings

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
PLACE = re.compile(
    r"(<!-- python -m tests\.kernels\.gate\.floors writes from here -->\n).*?(<!-- floors of kernels end here -->)",
    re.DOTALL,
)
#: Bytes of a launch that is too small to wait for anything but itself: an H200 copies them in a microsecond.
SMALL = 4.3e6
#: Threads whose instruction a multiprocessor issues in a cycle.
ISSUED = 4 * 32
#: Cycles a second: the highest of an H100 PCIe (its board specification). An SXM card's are more, up to 1.98e9, where
#: its power allows; a B200's are taken for the same.
CLOCK = 1.755e9


class Card(NamedTuple):
    """A GPU of the table."""

    #: In `quaver.core.costs.gpus.GPUS`.
    name: str
    arch: int
    multiprocessors: int


#: Source of the multiprocessors: NVIDIA's H100 white paper (SXM5), the H200's being the same chip; B200: 148 in cuda's
#: device properties, as Transformer Engine and DeepGEMM report them.
CARDS = {"H100": Card("h100", 90, 132), "H200": Card("h200", 90, 132), "B200": Card("b200", 100, 148)}


def copy_rate(card: str) -> float:
    """Bytes a second, read and written together."""
    return GPUS[CARDS[card].name].copy.value * 1e12


def share(a_byte: float, card: str) -> float:
    """The highest part of a card's copy rate at which a kernel of so many instructions a byte can run."""
    return CARDS[card].multiprocessors * ISSUED * CLOCK / a_byte / copy_rate(card)


def table(rows: ceilings.Table) -> str:
    """A line for each launch of tests/kernels/cases.py, from what ceilings.toml keeps of it."""
    head = ["kernel", "MB", *(f"{card}, µs" for card in CARDS), "instructions a byte", "programs an SM"]
    head += [f"{card}, %" for card in CARDS]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [_line(name, row) for name, row in rows.items() if counted(row)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def counted(row: dict[str, ceilings.Row]) -> bool:
    """Whether a launch's instructions a byte are known for the architectures of all cards."""
    return all("a_byte" in row.get(f"sm_{card.arch}", {}) for card in CARDS.values())


def _line(name: str, row: dict[str, ceilings.Row]) -> list[str]:
    hopper, blackwell = row["sm_90"], row["sm_100"]
    small = hopper["bytes"] < SMALL
    by_card = {name: row[f"sm_{card.arch}"] for name, card in CARDS.items()}
    return [
        name,
        f"{hopper['bytes'] / 1e6:.3g}",
        *(f"{at['bytes'] / copy_rate(card) * 1e6:.3g}" for card, at in by_card.items()),
        "" if small else f"{hopper['a_byte']:.3g}, {blackwell['a_byte']:.3g}",
        f"{hopper['programs']}, {blackwell['programs']}",
        *("" if small else f"{100 * share(at['a_byte'], card):.0f}" for card, at in by_card.items()),
    ]


def filled(page: str) -> str:
    """The page with the table of ceilings.toml.

    Raises:
        ValueError: it has no place for it.
    """
    text, places = PLACE.subn(lambda m: f"{m[1]}\n{table(ceilings.load().rows)}\n\n{m[2]}", page)
    if places != 1:
        raise ValueError(f"docs/performance.md has {places} places for the floors of kernels; it needs one")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
