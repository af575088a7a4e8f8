"""Private names of torch and Triton: each in one file of the sources, and listed in docs/design/private-names.md."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.contracts.sources import parsed, walk

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "triton")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in the file, full name) of every import."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def names(source: str) -> set[str]:
    """Full names of a framework's with a private part: as attributes, as imports, and as arguments of getattr."""
    tree = parsed(source)
    roots = {name: full for name, full in imported(tree) if full.split(".")[0] in FRAMEWORKS}
    used = {full for full in roots.values() if any(map(private, full.split(".")))}
    assigned = {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    }

    def full(node: ast.AST | None) -> str:
        if isinstance(node, ast.Attribute):
            return f"{start}.{node.attr}" if (start := full(node.value)) else ""
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            attribute = node.args[1]
            start = full(node.args[0])
            return f"{start}.{attribute.value}" if start and isinstance(attribute, ast.Constant) else ""
        if isinstance(node, ast.Name):
            value = assigned.get(node.id)
            return roots.get(node.id) or (full(value) if isinstance(value, ast.Attribute) else "")
        return ""

    used |= {name for node in walk(tree) if (name := full(node)) and any(map(private, name.split(".")))}
    # Only the longest name of a chain; torch._C alone is not specific.
    return {name for name in used if not any(other.startswith(f"{name}.") for other in used) and name != "torch._C"}


@cache
def users() -> dict[str, set[str]]:
    """The files that use each private name."""
    files: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "quaver").rglob("*.py")):
        for name in names(path.read_text()):
            files.setdefault(name, set()).add(path.relative_to(ROOT / "src" / "quaver").as_posix())
    return files


def test_a_private_name_is_used_in_one_file() -> None:
    several = {name: sorted(files) for name, files in users().items() if len(files) > 1}
    assert not several, f"give it a name of ours in the lowest room that needs it: {several}"


def test_every_private_name_is_in_the_table_of_the_docs() -> None:
    page = (ROOT / "docs" / "design" / "private-names.md").read_text()
    parts = {name: [part for part in name.split(".") if private(part) and part != "_C"] for name in users()}
    missing = [name for name, private_parts in parts.items() if not any(f"{part}`" in page for part in private_parts)]
    assert not missing, f"docs/design/private-names.md says what happens without it: {missing}"


def test_names_are_seen_however_they_are_reached() -> None:
    source = """
import torch
from torch.autograd import forward_ad as mode
from torch._dynamo import disable
_C = torch._C
a = torch._C._one()
b = getattr(_C, "_two", None)
c = mode._current_level
d = hasattr(torch, "_three")
e = x._parameters
"""
    expected = {"torch._C._one", "torch._C._two", "torch.autograd.forward_ad._current_level", "torch._three"}
    assert names(source) == expected | {"torch._dynamo.disable"}
