"""The table of docs/design/size.md: files and lines of each package. `python -m benchmarks.pages.size` writes it.

Code lines have at least one token that is neither a comment nor a docstring.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring import results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "size.md"
BEGIN, END = "<!-- python -m benchmarks.pages.size writes from here -->", "<!-- to here -->"
SOURCES = ROOT / "src" / "quaver"
#: Packages whose own packages have a row each.
DIVIDED = ("torch", "jax")
#: Tokens that make no line of code.
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """Sizes of some files."""

    files: int
    lines: int
    code: int
    docstrings: int

    def plus(self, other: "Size") -> "Size":
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Line numbers of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def measured(source: str) -> Size:
    """The size of one file."""
    docstrings = docstring_lines(ast.parse(source))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return Size(1, len(source.splitlines()), len(code - docstrings), len(docstrings))


def package(path: Path) -> str:
    """The row that a source file belongs to."""
    parts = path.relative_to(SOURCES).parts
    depth = 2 if parts[0] in DIVIDED and len(parts) > 2 else 1
    return ".".join(("quaver", *parts[:depth])) if len(parts) > 1 else "quaver"


@cache
def sizes(root: Path = SOURCES) -> dict[str, Size]:
    """Sizes by package."""
    found: dict[str, Size] = {}
    for path in sorted(root.rglob("*.py")):
        name = package(path)
        found[name] = found.get(name, Size(0, 0, 0, 0)).plus(measured(path.read_text(encoding="utf-8")))
    return found


def rows(found: dict[str, Size]) -> Iterator[list[str]]:
    """The cells of the table, and their sum."""
    total = Size(0, 0, 0, 0)
    for name, size in sorted(found.items()):
        total = total.plus(size)
        yield [f"`{name}`", *(f"{number:,}" for number in size)]
    yield ["all", *(f"{number:,}" for number in total)]


def written(page: str) -> str:
    """The page with this table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = results.table(("package", "files", "lines", "code", "docstrings"), list(rows(sizes())))
    return "\n".join([before + BEGIN, "", *table, "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
