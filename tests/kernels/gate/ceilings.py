"""The table of figures that a change must update knowingly: ceilings.toml, one row a launch and architecture."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kernels.gate.flow import executed
from tests.kernels.gate.machine_code import Code, ptxas_version
from tests.kernels.gate.occupancy import programs
from tests.kernels.gate.record import Recorded

PATH = Path(__file__).with_name("ceilings.toml")
HEADER = """\
# Ceilings of the compiled kernels: written by `python -m tests.kernels.gate --update`, checked by test_gate.py.
# A figure above its row fails; so does a launch without a row, or a row without a launch.
# instructions: of the listing, padding included; per_element: these times threads, over the elements of a program.
# loads, stores: of global memory, as count x bytes of a thread; shared: bytes of a program.
# bytes: that the launch cannot but move; a_byte: instructions executed by all its threads, over these bytes;
# products: multiply-adds of a kernel that they bound, not memory; rate: theirs in quaver.costs.hardware, if not bf16's;
# programs: that a multiprocessor runs side by side, the more the better.
# They hold for the versions below; with others only the rules (rules.py) are checked.
"""

Row = dict[str, Any]
Table = dict[str, dict[str, Row]]


@dataclass(frozen=True)
class Ceilings:
    """The table, and the version of Triton whose figures it holds."""

    triton: str
    rows: Table


def figures(recorded: Recorded, code: Code) -> Row:
    """A row of the table."""
    row: Row = {"registers": code.registers, "shared": code.shared, "instructions": code.instructions}
    share = recorded.threads_per_element
    if share is not None:
        row["per_element"] = round(code.instructions * share, 2)
    row["bytes"] = recorded.bytes
    if not recorded.case.rare:
        # Rows of rare launches give no loop counts.
        row["a_byte"] = instructions_a_byte(recorded, code)
    if recorded.products:
        row["products"] = recorded.products
        if recorded.rate != "bf16":
            row["rate"] = recorded.rate
    row["programs"] = programs(code.registers, code.shared, recorded.launch.warps, code.arch)
    return row | {"loads": _text(code.loads), "stores": _text(code.stores)}


def instructions_a_byte(recorded: Recorded, code: Code) -> float:
    """Instructions of all threads over the bytes that the launch cannot but move."""
    instructions, _ = executed(code.way, recorded.trips)
    return round(instructions * recorded.threads / recorded.bytes, 2)


def above(row: Row, ceiling: Row) -> list[str]:
    """Messages for the figures above those in the table."""
    higher = []
    for name in ("registers", "shared", "instructions", "per_element"):
        if name in row and row[name] > ceiling.get(name, 0):
            higher.append(f"{name} {row[name]}, the table has {ceiling.get(name)}")
    # Rows that were written before these were counted have none, until they are written anew.
    if row.get("a_byte", 0) > ceiling.get("a_byte", float("inf")):
        higher.append(f"a_byte {row['a_byte']}, the table has {ceiling['a_byte']}")
    if row.get("programs", 0) < ceiling.get("programs", 0):
        higher.append(f"programs {row.get('programs')}, the table has {ceiling['programs']}")
    for name in ("loads", "stores"):
        if _narrow(row[name]) > _narrow(ceiling.get(name, "")):
            higher.append(f"{name} narrower than 16 bytes: {row[name]}, the table has {ceiling.get(name)}")
    return higher


def load(path: Path = PATH) -> Ceilings:
    """The table as it is committed; an empty one where there is none."""
    data = tomllib.loads(path.read_text()) if path.exists() else {}
    versions = data.pop("versions", {})
    return Ceilings(versions.get("triton", ""), data)


def save(rows: Table, triton: str, path: Path = PATH) -> None:
    """Write the table."""
    lines = [HEADER, "[versions]", f'triton = "{triton}"', f'ptxas = "{ptxas_version()}"']
    for name, row in rows.items():
        lines += ["", f'["{name}"]']
        lines += [f"{arch} = {_inline(figures)}" for arch, figures in row.items()]
    path.write_text("\n".join(lines) + "\n")


def _inline(row: Row) -> str:
    return "{ " + ", ".join(f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in row.items()) + " }"


def _text(widths: dict[int, int]) -> str:
    return " ".join(f"{count}x{width}" for width, count in sorted(widths.items(), reverse=True))


def _narrow(text: str) -> int:
    pairs = (part.split("x") for part in text.split())
    return sum(int(count) for count, width in pairs if int(width) < 16)
