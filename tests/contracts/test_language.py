"""The language of the sources: names say what they hold; sentences name the condition, and not "somebody"."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.house import parsed, walk

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NAMED = [
    *SOURCES,
    *(path for part in ("tests", "benchmarks", "examples") for path in sorted((ROOT / part).rglob("*.py"))),
]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Participles and prepositions that tell nothing of a value. `Gpu.about` is public, and holds a GPU's full name.
EMPTY = {"found", "made", "about", "mine", "lying"}
#: Names that a reader remembers for so many lines and no more.
SHORT, LINES = {"what", "_what", "_What"}, 10
#: Without either a source is not parsed for it, which takes most of the time.
SOME_EMPTY = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(sorted(EMPTY))})(?![A-Za-z0-9])")
SOME_SHORT = re.compile(rf"\b(?:{'|'.join(sorted(SHORT))})\b")
PUBLIC = {("src/quaver/core/costs/gpus.py", "about")}
#: A sentence says which part of the program, or which condition, it means.
PERSON = re.compile(r"\b(somebody|someone|anybody|anyone|nobody|whoever)\b('s)?", re.IGNORECASE)
#: A string, and in the group what stands behind a "#" outside of all.
COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(\#[^\n]*)''',
    re.DOTALL,
)


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file gives a name to: variables, arguments, attributes, functions, classes."""
    for node in walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias):
            yield node.lineno, node.asname or node.name
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


@cache
def code(source: str) -> str:
    """A source without its strings and comments, whose prose has most of the words that no name may be."""
    return COMMENT.sub("", source)


def empty_names(source: str) -> list[tuple[int, str]]:
    if not SOME_EMPTY.search(code(source)):
        return []
    return sorted({(line, name) for line, name in bound(parsed(source)) if name.strip("_") in EMPTY})


def far(source: str) -> list[tuple[int, str]]:
    """(line, name) of functions in which a short name is used more than so many lines after it was given."""
    offences: list[tuple[int, str]] = []
    if not SOME_SHORT.search(code(source)):
        return offences
    for node in walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {(part.lineno, part.id) for part in walk(node) if isinstance(part, ast.Name)}
            names |= {(part.lineno, part.arg) for part in walk(node) if isinstance(part, ast.arg)}
            for short in SHORT:
                lines = [line for line, name in names if name == short]
                if lines and max(lines) - min(lines) > LINES:
                    offences.append((min(lines), short))
    return sorted(offences)


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


def persons(lines: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return sorted((line, match.group()) for line, text in lines for match in PERSON.finditer(text))


CHECKS = {"names": (empty_names, NAMED), "far": (far, NAMED), "sentences": (lambda s: persons(sentences(s)), SOURCES)}


@pytest.mark.parametrize("check", CHECKS)
def test_the_sources_name_what_they_mean(check: str) -> None:
    offences = []
    offending, paths = CHECKS[check]
    for path in paths:
        source, where = path.read_text(), path.relative_to(ROOT).as_posix()
        lines = offending(source)
        offences += [f"{where}:{line}: {word}" for line, word in lines if (where, word) not in PUBLIC]
    assert not offences, "say what it holds, or which condition it is:\n" + "\n".join(offences)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_it_means(page: Path) -> None:
    offences = persons(enumerate(page.read_text().splitlines(), 1))
    assert not offences, f"{page.name} does not say which part of the program it means: {offences}"


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "a, (b, made) = f()",
        "self.about = 1",
        "def f(*, about=None): pass",
        "def _made(): pass",
        "for found in x: pass",
        "y = [found for found in x]",
        "if (found := f()): pass",
        "with f() as made: pass",
        "import x as found",
        "try: pass\nexcept E as found: pass",
        "class A:\n    about: str",
        "mine = 1",
        "def lying(): pass",
    ],
)
def test_an_empty_name_is_seen(source: str) -> None:
    assert len(empty_names(source)) == 1
    for word, other in {"found": "layer", "made": "table", "about": "facts", "mine": "ours", "lying": "layout"}.items():
        source = source.replace(word, other)
    assert not empty_names(source)


def test_a_short_name_is_seen_where_it_is_used_far_from_where_it_was_given() -> None:
    text = "def f(what):\n" + "    x = 1\n" * 9 + "    return what\n"
    assert not far(text)
    assert far(text.replace("x = 1\n", "x = 1\n    y = 2\n")) == [(1, "what")]
    assert not far(text.replace("what", "row") * 2)


def test_a_name_that_is_only_read_or_passed_on_is_not_an_offence() -> None:
    assert not empty_names("print(x.found)\nf(about=3)\nfoundation = remade = 1")


def test_a_person_in_a_docstring_or_a_comment_is_seen_and_in_a_message_is_not() -> None:
    source = '"""Doc.\n\nIf Somebody looks on.\n"""\nx = 1  # nobody\'s\n\n\n'
    source += 'def f():\n    """Anyone."""\n    raise E("nobody")\n'
    assert persons(sentences(source)) == [(3, "Somebody"), (5, "nobody's"), (9, "Anyone")]
