"""The rooms of the house, counted: `python -m tests.contracts.house` writes the table of CONTRIBUTING.md anew.

A room of a package is a file or a package in it. An arrow leads from a room to one that it imports, imports inside
functions counted. It is upward if the floors, a tuple of rooms from the ground up, have the other room above.
"""

import ast
import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2] / "src"
PAGE = ROOT.parent / "CONTRIBUTING.md"
BEGIN, END = "<!-- python -m tests.contracts.house writes from here -->", "<!-- to here -->"
HEADER = ("package", "rooms", "floors", "arrows", "upward", "what is there, and what is not")
#: Its face shows recipes and rules alone, and whatever stands above those may import it.
SHOWN_BELOW = "quaver"


class Link(NamedTuple):
    """One import of ours."""

    module: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def parsed(source: str) -> ast.Module:
    """A file's tree, which several contracts walk over; nobody changes it.

    It stays until the end: a collector that walked over all trees again and again took four fifths of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


@cache
def walk(tree: ast.AST) -> list[ast.AST]:
    """A node and all nodes in it, in the order of `ast.walk`, kept for the next contract that walks there."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif value.__class__ is list:
                nodes.extend([one for one in value if isinstance(one, ast.AST)])
    return nodes


@cache
def modules(root: Path = ROOT, package: str = "quaver") -> Mapping[str, str]:
    """Source text by dotted name."""
    sources = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def everything() -> dict[str, str]:
    """Of the library and of the benchmarks."""
    return {**modules(), **modules(ROOT.parent, "benchmarks")}


def imports(name: str, source: str, known: set[str], is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement anywhere in the file; names of our own are taken down to the module."""
    for node in walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") + ([""] if is_package else [])
                base = ".".join([*parts[: -node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base


def packages(sources: Mapping[str, str]) -> list[str]:
    """Every package, by dotted name."""
    return sorted({name.rpartition(".")[0] for name in sources if "." in name})


def links(sources: Mapping[str, str]) -> list[Link]:
    """Every import of one of these modules by another."""
    known, inner = set(sources), set(packages(sources))
    return [
        Link(name, line, target)
        for name, source in sources.items()
        for line, target in imports(name, source, known, name in inner)
        if target in known
    ]


def room(name: str, package: str) -> str:
    """The room of a package that a module is in; "" for the package's own face and for modules elsewhere."""
    return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else ""


def rooms(sources: Mapping[str, str], package: str) -> set[str]:
    """The files and packages in a package."""
    return {room(name, package) for name in sources} - {""}


def arrows(all_links: Sequence[Link], package: str) -> dict[tuple[str, str], list[Link]]:
    """(room, another that it imports), with the imports."""
    between: dict[tuple[str, str], list[Link]] = {}
    for link in all_links:
        here, there = room(link.module, package), room(link.target, package)
        if here and there and here != there:
            between.setdefault((here, there), []).append(link)
    return between


def upward(all_links: Sequence[Link], package: str, floors: Sequence[str]) -> list[Link]:
    """Imports of a room above, and of a package's face, which stands above its rooms, from inside."""
    above = [
        link
        for (here, there), where in arrows(all_links, package).items()
        if here in floors and there in floors and floors.index(there) > floors.index(here)
        for link in where
    ]
    face = [link for link in all_links if link.target == package and room(link.module, package)]
    return above + (face if package != SHOWN_BELOW else [])


def height(sources: Mapping[str, str], all_links: Sequence[Link], package: str) -> int:
    """The rooms of the longest way down."""
    below: dict[str, set[str]] = {name: set() for name in rooms(sources, package)}
    for here, there in arrows(all_links, package):
        below[here].add(there)

    def depth(name: str, way: tuple[str, ...] = ()) -> int:
        way = (*way, name)
        return 1 + max((depth(other, way) for other in below[name] if other not in way), default=0)

    return max(map(depth, below), default=0)


def first_sentence(source: str) -> str:
    """Of a module's docstring; "" without one."""
    paragraph = (ast.get_docstring(parsed(source)) or "").split("\n\n")[0]
    return " ".join(paragraph.split())


def table(floors: Mapping[str, Sequence[str]]) -> str:
    """A row for each package."""
    sources = everything()
    all_links = links(sources)
    lines = [f"| {' | '.join(HEADER)} |", "|---|---:|---:|---:|---:|---|"]
    for name in packages(sources):
        counts = (
            len(rooms(sources, name)),
            height(sources, all_links, name),
            len(arrows(all_links, name)),
            len(upward(all_links, name, floors.get(name, ()))),
        )
        says = first_sentence(sources[name]).removesuffix(".")
        lines.append(f"| `{name}` | {' | '.join(map(str, counts))} | {says} |")
    return "\n".join(lines)


def written(page: str, floors: Mapping[str, Sequence[str]]) -> str:
    """A page with the table between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table(floors)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    from tests.contracts.test_layering import FLOORS

    PAGE.write_text(written(PAGE.read_text(), FLOORS))
