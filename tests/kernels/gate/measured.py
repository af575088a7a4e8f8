"""measured.json: figures from the machine code of every launch on every architecture, so that it is not compiled again.

An entry has a seal, a hash of the launch's key and of its figures. If the seal of the launch is still the same, neither
the kernel nor a figure was changed since it was compiled. The file is ignored with another version of Triton.
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
#: Hexadecimal digits of a seal, and the number of launches that a message names.
DIGITS, SHOWN = 16, 20

Figures = dict[str, Any]
#: The name of a launch, and an architecture.
Place = tuple[str, int]


class Entry(NamedTuple):
    """One launch on one architecture."""

    seal: str
    #: As `figures` gives them.
    figures: Figures


@dataclass(frozen=True)
class Measured:
    """The content of the file, and the version of Triton that it was written with."""

    triton: str
    entries: dict[Place, Entry]

    @property
    def applies(self) -> bool:
        return self.triton == triton.__version__

    def current(self, keys: Mapping[str, str], arch: int) -> dict[str, Figures]:
        """By name, the stored figures of the launches that did not change since.

        Args:
            keys: of launches for sm_`arch`, by their names.
        """
        figures = {}
        for name, key in keys.items() if self.applies else ():
            entry = self.entries.get((name, arch))
            if entry is not None and entry.seal == seal(key, entry.figures):
                figures[name] = entry.figures
        return figures

    def stale(self, keys: Mapping[int, Iterable[str]]) -> list[str]:
        """Entries that no row launches any more, a sentence each.

        Args:
            keys: by architecture, the names of all launches; entries of other architectures are not checked.
        """
        launched = {(name, arch) for arch, names in keys.items() for name in names}
        old = [(name, arch) for name, arch in self.entries if arch in keys and (name, arch) not in launched]
        return [f"sm_{arch} {name} is launched no more" for name, arch in old if self.applies]


def entry(key: str, figures: Figures) -> Entry:
    """The entry of a launch with this key and these figures."""
    return Entry(seal(key, figures), figures)


def seal(key: str, figures: Figures) -> str:
    """A hash of a launch's key and its figures."""
    return digest([key, figures])[:DIGITS]


def sentence(unknown: Sequence[str]) -> str:
    """The message for launches that are missing in the file, or changed."""
    shown = "; ".join(unknown[:SHOWN]) + (f"; and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else "")
    return f"measured.json is not of these kernels, or was changed by hand; `{WRITE}` writes what is missing: {shown}"


def figures(code: Code, recorded: Recorded) -> Figures:
    """The figures of a launch's code that the rules and the table need, without zeros.

    The path through its blocks is reduced to the instructions that a thread executes and the bytes that it moves, with
    the trips of its row.
    """
    out: Figures = {"executed": list(executed(code.way, recorded.trips))}
    for name, value in asdict(code).items():
        if name not in ("arch", "way") and value:
            out[name] = {str(width): n for width, n in sorted(value.items())} if isinstance(value, dict) else value
    return out


def code(figures: Figures, arch: int) -> Code:
    """The code that has these figures; its path is one block without loops."""
    count, moved = figures["executed"]
    values: dict[str, Any] = {"arch": arch, "way": (Block(count, moved, (), ()),)}
    for field in fields(Code):
        if field.name in values:
            continue
        value = figures.get(field.name, 0 if field.type is int else {})
        values[field.name] = {int(width): n for width, n in value.items()} if isinstance(value, dict) else value
    return Code(**values)


def load(path: Path = PATH) -> Measured:
    """The file as it is committed; an empty one where there is none."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"versions": {}, "launches": {}}
    entries: dict[Place, Entry] = {}
    for name, groups in data["launches"].items():
        for group in groups:
            figures = {figure: value for figure, value in group.items() if figure != "seals"}
            entries |= {(name, int(arch)): Entry(seal, figures) for arch, seal in group["seals"].items()}
    return Measured(data["versions"].get("triton", ""), entries)


def save(entries: Mapping[Place, Entry], path: Path = PATH) -> None:
    """Write the file: launches by name, of each one line for all architectures with the same figures."""
    names = sorted({name for name, _ in entries})
    texts = [f"{json.dumps(name)}: [\n{_lines(name, entries)}\n]" for name in names]
    versions = json.dumps({"triton": triton.__version__, "ptxas": ptxas_version()})
    path.write_text(f'{{"versions": {versions}, "launches": {{\n' + ",\n".join(texts) + "\n}}\n", encoding="utf-8")


def _lines(name: str, entries: Mapping[Place, Entry]) -> str:
    groups: dict[str, dict[str, Any]] = {}
    for arch in sorted(arch for other, arch in entries if other == name):
        one = entries[name, arch]
        group = groups.setdefault(json.dumps(one.figures, sort_keys=True), {"seals": {}, **one.figures})
        group["seals"][str(arch)] = one.seal
    return ",\n".join(json.dumps(group, separators=(",", ":")) for group in groups.values())
