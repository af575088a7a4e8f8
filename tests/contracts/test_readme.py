"""README stays short and its Python blocks run; the package tables of docs/design/architecture.md match the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "design" / "architecture.md"
SOURCE = ROOT / "src"

#: A page that contains this line runs its Python blocks in one namespace; on other pages each block runs alone.
CONTINUES = "Each block continues the ones before it."
#: Packages whose table lists every package and module directly inside them.
TABLES = ("quaver", "quaver.torch", "quaver.jax")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
PACKAGE_ROW = re.compile(r"^\| `(quaver(?:\.\w+)+)` \|", re.MULTILINE)

SAMPLE = """# Quaver
| package | what it holds |
|---|---|
| `quaver.reference` | formats; `quaver.nowhere` is only mentioned |
| `quaver.torch` | PyTorch |

| package | what it holds |
|---|---|
| `quaver.torch.linear` | layers |
```python
x = 1
```
```console
$ not python
```
```python title="second"
assert x == 1
```
"""


def listed(text: str) -> dict[str, set[str]]:
    """Packages in the first column of a page's tables, by the package that contains them."""
    children: dict[str, set[str]] = {}
    for name in PACKAGE_ROW.findall(text):
        parent, _, child = name.rpartition(".")
        children.setdefault(parent, set()).add(child)
    return children


def existing(package: str) -> set[str]:
    """Packages that contain Python files and public modules directly inside a package."""
    folder = SOURCE.joinpath(*package.split("."))
    packages = {path.name for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    return packages | {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Line of the first statement and code of every Python block."""
    return [(text[: m.start(2)].count("\n") + 1, m[2]) for m in FENCE.finditer(text) if m[1] == "python"]


def run_blocks(page: Path) -> None:
    """Run each Python block alone, or all in one namespace if the page contains `CONTINUES`."""
    text = page.read_text()
    names: dict[str, object] = {}
    for line, code in python_blocks(text):
        if CONTINUES not in text or not names:
            names = {"__name__": "page"}
        try:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        except Exception as error:
            error.add_note(f"in the block of {page.name} that begins on line {line}:\n{code}")
            raise


@pytest.mark.parametrize("package", TABLES)
def test_architecture_lists_every_package(package: str) -> None:
    assert listed(ARCHITECTURE.read_text()).get(package, set()) == existing(package)


def test_readme_has_at_most_180_lines() -> None:
    assert len(README.read_text().splitlines()) <= 180


def test_readme_names_the_two_commands() -> None:
    commands = "".join(body for kind, body in FENCE.findall(README.read_text()) if kind == "console")
    targets = re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"] and all(f"\n{target}:" in makefile for target in targets)


def test_every_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(README)


def test_package_tables_are_read() -> None:
    assert listed(SAMPLE) == {"quaver": {"reference", "torch"}, "quaver.torch": {"linear"}}


def test_python_blocks_are_found_with_their_lines() -> None:
    blocks = python_blocks(SAMPLE)
    assert [code for _, code in blocks] == ["x = 1\n", "assert x == 1\n"]
    assert [SAMPLE.splitlines()[line - 1] for line, _ in blocks] == ["x = 1", "assert x == 1"]
