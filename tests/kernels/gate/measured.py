"""What was read from the machine code of every launch on every architecture: measured.json, judged without compiling.

A launch has a seal there, of its key and of its figures. Where the seal is what the launch has now, neither the kernel
nor a figure was changed since it was compiled. With another version of Triton than the file's it holds for nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import triton

from tests.kernels.gate.flow import Block, executed
from tests.kernels.gate.keys import digest
from tests.kernels.gate.machine_code import Code, ptxas_version
from tests.kernels.gate.record import Recorded

PATH = Path(__file__).with_name("measured.json")
WRITE = "python -m tests.kernels.gate --measure"
#: Hexadecimal digits of a seal, and launches that a sentence names.
DIGITS, SHOWN = 16, 20

Figures = dict[str, Any]
#: A launch by its name, on an architecture.
Place = tuple[str, int]


class Entry(NamedTuple):
    """One launch on one architecture."""

    seal: str
    #: As `figures` gives them.
    figures: Figures


@dataclass(frozen=True)
class Measured:
    """The file, and the version of Triton that it holds for."""

    triton: str
    entries: dict[Place, Entry]

    @property
    def applies(self) -> bool:
        return self.triton == triton.__version__

    def holding(self, keys: Mapping[str, str], arch: int) -> dict[str, Figures]:
        """By name, the figures of those launches that are here as they are now.

        Args:
            keys: of launches for sm_`arch`, by their names.
        """
        held = {}
        for name, key in keys.items() if self.applies else ():
            entry = self.entries.get((name, arch))
            if entry is not None and entry.seal == seal(key, entry.figures):
                held[name] = entry.figures
        return held

    def gone(self, keys: Mapping[int, Iterable[str]]) -> list[str]:
        """What is here and launched no more, of all launches of some architectures, a sentence each."""
        launched = {(name, arch) for arch, names in keys.items() for name in names}
        old = [(name, arch) for name, arch in self.entries if arch in keys and (name, arch) not in launched]
        return [f"sm_{arch} {name} is launched no more" for name, arch in old if self.applies]


def entry(key: str, of: Figures) -> Entry:
    """What is written of a launch of this key that has these figures."""
    return Entry(seal(key, of), of)


def seal(key: str, of: Figures) -> str:
    """What says that a launch of this key has these figures."""
    return digest([key, of])[:DIGITS]


def sentence(unknown: Sequence[str]) -> str:
    """That launches are not in the file as they are now."""
    shown = "; ".join(unknown[:SHOWN]) + (f"; and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
    return f"measured.json is not of these kernels, or was changed by hand; `{WRITE}` writes what is missing: {shown}"


def figures(code: Code, recorded: Recorded) -> Figures:
    """What the rules and the table read of a launch's code, zeros left out.

    Of its way are left the instructions that a thread executes and the bytes that it moves, with the trips of its row.
    """
    kept: Figures = {"executed": list(executed(code.way, recorded.trips))}
    for name, value in asdict(code).items():
        if name not in ("arch", "way") and value:
            kept[name] = {str(width): n for width, n in sorted(value.items())} if isinstance(value, dict) else value
    return kept


def code(of: Figures, arch: int) -> Code:
    """The code that has these figures; its way is one block without loops."""
    count, moved = of["executed"]
    told: dict[str, Any] = {"arch": arch, "way": (Block(count, moved, (), ()),)}
    for field in fields(Code):
        if field.name in told:
            continue
        value = of.get(field.name, 0 if field.type is int else {})
        told[field.name] = {int(width): n for width, n in value.items()} if isinstance(value, dict) else value
    return Code(**told)


def load(path: Path = PATH) -> Measured:
    """The file as it is committed; an empty one where there is none."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"versions": {}, "launches": {}}
    entries: dict[Place, Entry] = {}
    for name, groups in data["launches"].items():
        for group in groups:
            of = {figure: value for figure, value in group.items() if figure != "seals"}
            entries |= {(name, int(arch)): Entry(seal, of) for arch, seal in group["seals"].items()}
    return Measured(data["versions"].get("triton", ""), entries)


def save(entries: Mapping[Place, Entry], path: Path = PATH) -> None:
    """Write the file: launches by name, of each a line for all architectures that have the same figures."""
    names = sorted({name for name, _ in entries})
    of_names = [f"{json.dumps(name)}: [\n{_lines(name, entries)}\n]" for name in names]
    versions = json.dumps({"triton": triton.__version__, "ptxas": ptxas_version()})
    path.write_text(f'{{"versions": {versions}, "launches": {{\n' + ",\n".join(of_names) + "\n}}\n", encoding="utf-8")


def _lines(name: str, entries: Mapping[Place, Entry]) -> str:
    groups: dict[str, dict[str, Any]] = {}
    for arch in sorted(arch for of, arch in entries if of == name):
        one = entries[name, arch]
        group = groups.setdefault(json.dumps(one.figures, sort_keys=True), {"seals": {}, **one.figures})
        group["seals"][str(arch)] = one.seal
    return ",\n".join(json.dumps(group, separators=(",", ":")) for group in groups.values())
