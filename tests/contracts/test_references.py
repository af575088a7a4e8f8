"""Modules, names and files that docstrings, comments and pages mention exist: a rename must rename its mentions too.

CHANGELOG is left out, since it describes old releases, and so are strings in sources, which have their own tests.
"""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.sources import ROOT, modules, parsed, sentences, walk

HOME = ROOT.parent
TREES = {"quaver": ROOT, "benchmarks": HOME, "tests": HOME}
FILES = (
    subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=HOME, text=True).split()
    if (HOME / ".git").exists()
    else []
)

QUOTED = re.compile(r"(\S+ )?`([^`\n]+)`")
#: Names of Quaver, also without quotes; quaver.hpp is a file.
WHOLE = re.compile(r"(?<![\w./-])(?:quaver|benchmarks|tests)(?:\.(?!h(?:pp)?\b)[A-Za-z_]\w*)+")
SHORT = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|json|h|hpp)")
#: Names of other projects, after `owner/repository`, or files that must not exist: "no `utils.py`".
OTHERS = re.compile(r"""[\w-]+/[\w.-]+ $|"?no $""")
#: First parts of paths that are relative to the repository.
PLACES = {"src", "tests", "benchmarks", "docs", "examples", "quaver"}
#: Libraries with a package of Quaver of the same name.
LIBRARIES = {"torch", "jax", "flax"}
#: Placeholders.
ANY = re.compile(r"NAME|\.\.\.|\*")


@cache
def trees() -> dict[str, ast.Module]:
    """Every library module by dotted name."""
    sources = {name: source for package, root in TREES.items() for name, source in modules(root, package).items()}
    return {name: parsed(source) for name, source in sources.items()}


@cache
def bound(node: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Names bound by a module or class, or anything in it, with their values."""
    names: dict[str, ast.AST] = {}
    for part in walk(node):
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            names.setdefault(part.name, part)
        elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            names.setdefault(part.id if isinstance(part, ast.Name) else part.attr, part)
        elif isinstance(part, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name: part for alias in part.names}
    return names


def resolves(reference: str) -> bool:
    """True if a dotted name is a library module or a name bound in one."""
    parts = reference.split(".")
    for length in range(len(parts), 0, -1):
        module = trees().get(".".join(parts[:length]))
        if module is not None:
            inner = parts[length:]
            return not inner or (inner[0] in bound(module) and _inside(bound(module)[inner[0]], inner))
    return False


def _inside(value: ast.AST, inner: list[str]) -> bool:
    """True if the value of a name has the following attribute names, as far as the source shows."""
    if len(inner) == 1 or not isinstance(value, ast.ClassDef):
        return True
    return inner[1] in bound(value)


@cache
def known() -> tuple[frozenset[str], frozenset[str]]:
    """(parts of modules' names; every name that is bound, an argument, or a word of its own such as a parameter's)."""
    names = {name for tree in trees().values() for name in bound(tree)}
    for node in (node for tree in trees().values() for node in walk(tree)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    buffers = {part for name in trees() for part in name.split(".")}
    return frozenset(buffers), frozenset(names | buffers)


@cache
def places() -> frozenset[str]:
    """Every file and folder of the repository, with a "/" before it."""
    return frozenset(f"/{place}" for file in FILES for place in (file, *map(str, Path(file).parents)))


@cache
def is_file(path: str) -> bool:
    """True if a file or folder of the repository ends in this path."""
    return any(place.endswith(f"/{path.strip('/')}") for place in places())


def missing(line: str) -> list[str]:
    """Names and files that a line of prose mentions and that do not exist."""
    absent = [name for name in WHOLE.findall(line) if not resolves(name)]
    buffers, names = known()
    for before, quoted in QUOTED.findall(line):
        if ANY.search(quoted) or OTHERS.match(before):
            continue
        parts = quoted.split(".")
        if PATH.fullmatch(quoted):
            ours = quoted.split("/")[0] in PLACES | buffers if "/" in quoted else quoted.endswith((".py", ".h", ".hpp"))
            absent += [quoted] if ours and not is_file(quoted) else []
        elif SHORT.fullmatch(quoted) and parts[0] in buffers and parts[0] not in {*TREES, *LIBRARIES}:
            absent += [quoted] if not all(part in names for part in parts) else []
    return absent


def prose(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a page, or of a source's docstrings and comments."""
    text = path.read_text()
    return sorted(sentences(text)) if path.suffix == ".py" else list(enumerate(text.splitlines(), 1))


@pytest.mark.skipif(not FILES, reason="the list of files comes from git")
def test_names_in_prose_exist() -> None:
    pages = [HOME / file for file in FILES if file.endswith((".py", ".md")) and file != "CHANGELOG.md"]
    absent = [
        f"{path.relative_to(HOME)}:{line}: {name}"
        for path in pages
        if path.exists()
        for line, text in prose(path)
        for name in missing(text)
    ]
    assert not absent, "there is no such module, name or file:\n" + "\n".join(absent)


@pytest.mark.skipif(not FILES, reason="the list of files comes from git")
@pytest.mark.parametrize(
    "line",
    [
        "see `quaver.torch.nowhere`",
        "see quaver.reference.nowhere",
        "of `quaver.torch.linear.linear.Linear.nowhere`",
        "as `quaver.recipes.spec.Nowhere`",
        "by `scaled_mm.nowhere_either`",
        "in `linear.nowhere_at_all.step`",
        "written in `src/quaver/nowhere.py`",
        "read `tests/nowhere/`",
        "the table (`nowhere.py`)",
    ],
)
def test_missing_names_are_found(line: str) -> None:
    assert len(missing(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "see `quaver.torch.Linear` and `quaver.reference.quantize`, quaver.recipes.RECIPES",
        "of `quaver.torch.linear.linear.Linear.forward`",
        "google/qwix `qconfig.py` has it, `torch.nowhere` and `np.nowhere` are others'",
        "write `src/quaver/recipes/NAME.py`",
    ],
)
def test_existing_and_foreign_names_pass(line: str) -> None:
    assert not missing(line)
