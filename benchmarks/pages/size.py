"""The tables of docs/design/size.md, files and lines by subject and by package: `python -m benchmarks.pages.size`.

Code lines have at least one token that is neither a comment nor a docstring.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
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
#: Subjects of `quaver.torch`: code lines before the front end was simplified (efd041fc), and the files. A file belongs
#: to the first subject that has it.
SUBJECTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "FSDP": (1_379, ("parallel/fsdp", "parallel/comm_counter.py")),
    "tensor parallelism": (1_459, ("parallel/tensor",)),
    "context, expert and pipeline parallelism, checkpoints": (2_285, ("parallel",)),
    "delayed scaling": (953, ("state/history",)),
    "weight cache": (261, ("state/weight_cache.py",)),
    "Hugging Face": (
        3_530,
        ("conversion/huggingface", "conversion/matchers", "conversion/replace", "conversion/probe.py"),
    ),
    "export": (1_272, ("conversion/export",)),
    "optimizers": (3_658, ("optim",)),
    "GPU backend": (4_326, ("backends/gpu",)),
    "CPU backend": (802, ("backends/cpu",)),
    "attention": (2_896, ("nn/attention",)),
    "state space": (1_208, ("nn/ssm",)),
    "linear layers": (3_786, ("linear",)),
    "the rest": (6_391, ("",)),
}
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
    #: Tokens in the code lines.
    tokens: int

    def plus(self, other: "Size") -> "Size":
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the line numbers of all docstrings."""
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
    """Return the size of a file."""
    docstrings = docstring_lines(ast.parse(source))
    code: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
            tokens += token.start[0] not in docstrings
    return Size(1, len(source.splitlines()), len(code - docstrings), len(docstrings), tokens)


def package(path: Path) -> str:
    """Return the row of a source file."""
    parts = path.relative_to(SOURCES).parts
    depth = 2 if parts[0] in DIVIDED and len(parts) > 2 else 1
    return ".".join(("quaver", *parts[:depth])) if len(parts) > 1 else "quaver"


@cache
def sizes(root: Path = SOURCES) -> dict[Path, Size]:
    """Return sizes by file."""
    return {path: measured(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}


def added(found: Iterable[Size]) -> Size:
    """Return the sum of sizes."""
    total = Size(0, 0, 0, 0, 0)
    for size in found:
        total = total.plus(size)
    return total


def rows(found: dict[Path, Size]) -> Iterator[list[str]]:
    """Yield the cells of the table by package, and their sum."""
    by_package: dict[str, list[Size]] = {}
    for path, size in found.items():
        by_package.setdefault(package(path), []).append(size)
    for name, each in (*sorted(by_package.items()), ("all", list(found.values()))):
        files, lines, code, docstrings, tokens = added(each)
        ratio = f"{tokens / code:.1f}" if code else ""
        yield [name if name == "all" else f"`{name}`", f"{files}", f"{lines:,}", f"{code:,}", f"{docstrings:,}", ratio]


def subjects(found: dict[Path, Size]) -> Iterator[list[str]]:
    """Yield the cells of the table by subject."""
    rest = {path: size for path, size in found.items() if (SOURCES / "torch") in path.parents}
    for name, (before, places) in SUBJECTS.items():
        own = [path for path in rest if any((SOURCES / "torch" / place) in (path, *path.parents) for place in places)]
        size = added(rest.pop(path) for path in own)
        yield [name, f"{before:,}", f"{size.code:,}", f"{size.files}"]


def written(page: str) -> str:
    """Return the page with these tables."""
    headers = ("package", "files", "lines", "code", "docstrings", "tokens per code line")
    by_package = results.table(headers, list(rows(sizes())))
    by_subject = results.table(("subject", "code before", "code", "files"), list(subjects(sizes())))
    return results.between(page, BEGIN, END, [*by_subject, "", *by_package])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
