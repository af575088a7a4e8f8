"""The sources of the library as text and as syntax trees, and the modules that each imports."""

import ast
import gc
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"
#: A string, or a comment (the group) outside of strings.
COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(\#[^\n]*)''',
    re.DOTALL,
)


@cache
def parsed(source: str) -> ast.Module:
    """A file's syntax tree, shared by several contracts; it must not be changed.

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
    """A node and all nodes in it, in the order of `ast.walk`, cached for other contracts."""
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
    """The modules of the library and of the benchmarks."""
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


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment; a tokenizer takes thirty times as long."""
    line, place = 1, 0
    for match in COMMENT.finditer(source):
        if match[1]:
            line, place = line + source.count("\n", place, match.start()), match.start()
            yield line, match[1]


@cache
def sentences(source: str) -> tuple[tuple[int, str], ...]:
    """(line, text) of every docstring and comment, line by line."""
    return *comments(source), *docstrings(source)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in walk(parsed(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                for offset, text in enumerate(str(first.value.value).split("\n")):
                    yield first.lineno + offset, text
