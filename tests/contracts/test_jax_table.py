"""The table of features in docs/guides/jax.md names every public name of quaver.torch, and only names that exist."""

import importlib
import re

import pytest

import quaver.torch as qt
from tests.contracts.test_readme import ROOT

PAGE = ROOT / "docs" / "guides" / "jax.md"
MODULES = {
    "qt": "quaver.torch",
    "qj": "quaver.jax",
    "ql": "quaver.jax.linen",
    "qn": "quaver.jax.nnx",
    "qo": "quaver.jax.optim",
}


def rows() -> list[tuple[str, str, str]]:
    table = PAGE.read_text().partition("## Features")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip("| ") for cell in line.split(" | ")] for line in lines]
    assert all(len(row) == 3 for row in cells)
    return [(feature, torch, jax) for feature, torch, jax in cells[1:]]


def names(cell: str) -> list[str]:
    """Dotted names of Quaver in a cell, with the module's name in place of its abbreviation."""
    found = re.findall(r"`(\w+(?:\.\w+)+)", cell)
    return [
        f"{MODULES.get(head, head)}.{rest}"
        for head, _, rest in (name.partition(".") for name in found)
        if head in (*MODULES, "quaver")
    ]


def resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_every_public_name_of_the_torch_front_end_is_in_the_table() -> None:
    listed = {name.removeprefix("quaver.torch.") for _, torch, _ in rows() for name in names(torch)}
    assert set(qt.__all__) <= listed, sorted(set(qt.__all__) - listed)


def test_every_name_in_the_table_exists() -> None:
    every = [name for row in rows() for cell in row[1:] for name in names(cell)]
    assert len(every) > 100 and not [name for name in every if not resolves(name)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_feature_is_in_jax_or_has_a_reason(row: tuple[str, str, str]) -> None:
    _, _, jax = row
    if jax.startswith("no"):
        assert re.match(r"no: .{20,}", jax), jax
    else:
        assert "`" in jax or jax == "automatic", jax
