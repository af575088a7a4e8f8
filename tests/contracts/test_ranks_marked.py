"""Test that every test that starts ranks has the marker `ranks` and is in a folder of `make test-ranks`."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

#: Names that start ranks: torchrun's module, and the package of the benchmarks.
TORCHRUN, STARTED = "torch.distributed.run", "benchmarks.cases.ranks.started"
#: Folders with optional libraries: `make test-integrations` runs their tests.
APART = "tests/integrations/"
MARK = "pytest.mark.ranks"


@cache
def module(name: str) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """The functions and classes of a test module, and its imported names."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    if not name.startswith("tests.") or not path.exists():
        return {}, {}
    body = ast.parse(path.read_text(encoding="utf-8"))
    own = {each.name: each for each in body.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    names = {}
    for each in ast.walk(body):
        if isinstance(each, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{each.module}.{alias.name}" for alias in each.names}
    return own, names


def starts(name: str, function: str, seen: dict[str, bool]) -> bool:
    """Whether a function or class of a module starts ranks, or calls one that does.

    Args:
        seen: what is known already, by name.
    """
    whole = f"{name}.{function}"
    if whole not in seen:
        # Set before the visit, so that recursion ends.
        seen[whole] = False
        seen[whole] = function in module(name)[0] and any_starts(name, function, seen)
    return seen[whole]


def any_starts(name: str, function: str, seen: dict[str, bool]) -> bool:
    """Whether a node in the function or class starts ranks."""
    own, names = module(name)
    for node in ast.walk(own[function]):
        if isinstance(node, ast.Constant) and node.value == TORCHRUN:
            return True
        if isinstance(node, ast.Call) and any(
            each.arg == "is_master" and isinstance(each.value, ast.Constant) and each.value.value
            for each in node.keywords
        ):
            return True
        if isinstance(node, ast.Name):
            to = names.get(node.id, f"{name}.{node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            to = f"{names[node.value.id]}.{node.attr}"
        else:
            continue
        place, _, called = to.rpartition(".")
        if to == STARTED or starts(place, called, seen):
            return True
    return False


def every_test() -> list[tuple[str, str, bool, bool]]:
    """File and name of every test, whether it starts ranks, and whether it is marked."""
    every = []
    seen: dict[str, bool] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "rank" not in path.read_text(encoding="utf-8"):
            continue
        file = path.relative_to(ROOT).as_posix()
        name = file.removesuffix(".py").replace("/", ".")
        for function, node in module(name)[0].items():
            if function.startswith("test_") and isinstance(node, ast.FunctionDef):
                marked = any(ast.unparse(each) == MARK for each in node.decorator_list)
                every.append((file, function, starts(name, function, seen), marked))
    return every


def test_tests_that_start_ranks_are_marked_and_found_by_the_make_target() -> None:
    every = every_test()
    wrong = [f"{file}::{name}: {MARK} is {marked}" for file, name, starting, marked in every if starting != marked]
    assert not wrong, wrong
    places = re.search(r"^RANKS := ((?:.*\\\n)*.*)", Path(ROOT, "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert places is not None
    looks = [each for each in places[1].split() if each != "\\"]
    marked_in = {file for file, _, _, marked in every if marked and not file.startswith(APART)}
    assert len(marked_in) > 20, "the files of ranks are not seen"
    missed = [file for file in marked_in if not any(file == at or file.startswith(f"{at}/") for at in looks)]
    assert not missed, f"make test-ranks does not look into {missed}"
    vain = [at for at in looks if not any(file == at or file.startswith(f"{at}/") for file in marked_in)]
    assert not vain, f"make test-ranks looks in vain into {vain}"
