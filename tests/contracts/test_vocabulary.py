"""Class names and docstrings can be understood without knowing the module that they are in."""

import ast
from collections import defaultdict
from functools import cache

from tests.conftest import ROOT
from tests.contracts.sources import parsed, walk

SOURCE = ROOT / "src/quaver"
#: Packages that offer the same classes to different users, with the same names.
FRONT_ENDS = ("torch", "jax/linen", "jax/nnx", "jax", "reference", "train/torch", "train/jax")
#: A docstring begins with a verb or a noun phrase for the result, not with one of these.
OPENINGS = ("What", "Whether", "Of")


@cache
def modules() -> dict[str, ast.Module]:
    return {path.relative_to(SOURCE).as_posix(): parsed(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def front_end(path: str) -> str:
    return next((each for each in FRONT_ENDS if path.startswith(f"{each}/")), "")


def test_a_class_name_is_defined_in_one_module_of_a_front_end() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        if not path.startswith("compat/"):  # the peers' own names
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    several = {}
    for name, paths in places.items():
        front_ends = [front_end(path) for path in paths]
        if len(paths) > 1 and ("" in front_ends or len(set(front_ends)) < len(paths)):
            several[name] = paths
    assert modules() and not several


def test_no_docstring_begins_with_what_whether_or_of() -> None:
    wrong = []
    for path, tree in modules().items():
        for node in walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0] in OPENINGS:
                    wrong.append(f"{path}:{getattr(node, 'name', '')}: {' '.join(words[:6])}")
    assert not wrong
