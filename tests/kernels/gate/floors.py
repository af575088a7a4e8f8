"""The least time of each kernel on a card, by bytes and by instructions: a table of docs/design/performance.md.

    floor    bytes of its tensors / copy rate
    share    what the card can issue / instructions a byte / copy rate

The share is the highest part of the copy rate that a kernel can reach. A card issues one instruction of a warp of
32 threads in each of a multiprocessor's four parts at every cycle, which no kernel quite reaches; an instruction of
several cycles, such as an exponential, is counted as one. Below 100 % a kernel is bound by its instructions.
Where products take longer than bytes, as attention's do, they are the floor: another table has their time, and the
highest part of the rate of products.

`python -m tests.kernels.gate.floors` writes the table from the figures of ceilings.toml; a test compares them.
"""

import re
from pathlib import Path
from typing import NamedTuple

from quaver.costs.hardware import GPUS
from tests.kernels.gate import ceilings

PAGE = Path(__file__).parents[3] / "docs" / "design" / "performance.md"
PLACE = re.compile(
    r"(<!-- python -m tests\.kernels\.gate\.floors writes from here -->\n).*?(<!-- floors of kernels end here -->)",
    re.DOTALL,
)
OF_PRODUCTS = re.compile(
    r"(<!-- those that products bound, from here -->\n).*?(<!-- floors by products end here -->)", re.DOTALL
)
#: Bytes of a launch that is too small for a floor: an H200 copies them in a microsecond.
SMALL = 4.3e6
#: Threads whose instruction a multiprocessor issues in a cycle.
ISSUED = 4 * 32
#: Cycles a second: the highest of an H100 PCIe (its board specification). An SXM card's are more, up to 1.98e9, where
#: its power allows; a B200's are taken for the same.
CLOCK = 1.755e9


class Card(NamedTuple):
    """A GPU of the table."""

    #: In `quaver.costs.hardware.GPUS`.
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


def product_rate(card: str, rate: str) -> float:
    """Multiply-adds a second, at the bf16 or the FP8 rate."""
    return GPUS[CARDS[card].name].rates[rate].value * 1e12 / 2


def share_of_products(row: ceilings.Row, card: str) -> float:
    """The highest part of a card's rate of products at which a kernel can run by its instructions."""
    issued = CARDS[card].multiprocessors * ISSUED * CLOCK
    return row["products"] / product_rate(card, row.get("rate", "bf16")) / (row["a_byte"] * row["bytes"] / issued)


def table_of_products(rows: ceilings.Table) -> str:
    """`table` for kernels that are bound by their products."""
    head = ["kernel", "GFLOP", *(f"{card}, ms" for card in CARDS), "instructions for 1000 multiply-adds"]
    head += ["programs an SM", *(f"{card}, %" for card in CARDS)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [_line_of_products(name, row) for name, row in rows.items() if counted(row) and bound_by_products(row)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bound_by_products(row: dict[str, ceilings.Row]) -> bool:
    return "products" in row["sm_90"]


def _line_of_products(name: str, row: dict[str, ceilings.Row]) -> list[str]:
    hopper, blackwell = row["sm_90"], row["sm_100"]
    by_card = {name: row[f"sm_{card.arch}"] for name, card in CARDS.items()}
    dense = (1000 * at["a_byte"] * at["bytes"] / at["products"] for at in (hopper, blackwell))
    return [
        name,
        f"{2 * hopper['products'] / 1e9:.4g}",
        *(f"{at['products'] / product_rate(card, at.get('rate', 'bf16')) * 1e3:.3g}" for card, at in by_card.items()),
        ", ".join(f"{one:.3g}" for one in dense),
        f"{hopper['programs']}, {blackwell['programs']}",
        *(f"{100 * share_of_products(at, card):.0f}" for card, at in by_card.items()),
    ]


def table(rows: ceilings.Table) -> str:
    """A line for each launch of tests/kernels/cases.py, from its figures in ceilings.toml."""
    head = ["kernel", "MB", *(f"{card}, µs" for card in CARDS), "instructions a byte", "programs an SM"]
    head += [f"{card}, %" for card in CARDS]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [_line(name, row) for name, row in rows.items() if counted(row) and not bound_by_products(row)]
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
    """The page with the tables of ceilings.toml.

    Raises:
        ValueError: it has no place for one of them.
    """
    rows = ceilings.load().rows
    for place, written in ((PLACE, table(rows)), (OF_PRODUCTS, table_of_products(rows))):
        page, places = place.subn(lambda m, written=written: f"{m[1]}\n{written}\n\n{m[2]}", page)
        if places != 1:
            raise ValueError(f"docs/design/performance.md has {places} places for {place.pattern}; it needs one")
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
