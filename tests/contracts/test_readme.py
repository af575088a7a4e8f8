"""The README is kept true: its tree is the tree, and every block of Python in it runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
HOUSE = ROOT / "src" / "quaver"

#: What a page says whose blocks need the ones before them; the blocks of other pages run alone.
CONTINUES = "Each block continues the ones before it."
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
BRANCH = re.compile(r"^((?:│   |    )*)(?:├──|└──) (.+)$")
NAME = re.compile(r"[\w.-]+(?:/|\.py)$")

SAMPLE = """# Quaver
## The house
Words before it.
```
src/quaver/
├── __init__.py      recipes and formats
├── core/            NUMBERS: a.py is only mentioned
│   ├── formats.py   Format
│   └── plan.py rules.py   two on a line
├── recipes/         one file a recipe
└── torch/
    └── ops.py
```
## Next
```
├── other.py
```
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


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next of its level or above."""
    heading = re.search(rf"^(#+) +{title} *$", text, re.MULTILINE)
    assert heading, f"README.md has no section {title!r}"
    rest = _without_comments(text[heading.end() :])
    end = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return text[heading.end() :][: end.start() if end else None]


def _without_comments(text: str) -> str:
    """Fenced blocks blanked out, so that a comment in code is not taken for a heading."""
    return FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def tree(text: str) -> dict[str, dict[str, None]]:
    """What the section "The house" draws: names by folder of src/quaver, folders with a slash at the end, in order."""
    drawings = [body for _, body in FENCE.findall(section(text, "The house")) if "──" in body]
    assert drawings, 'the section "The house" of README.md has no fenced drawing with ├── in it'
    children: dict[str, dict[str, None]] = {"": {}}
    path: list[str] = []
    for line in drawings[0].splitlines():
        branch = BRANCH.match(line)
        if branch is None:
            continue
        depth = len(branch[1]) // 4
        parent = "".join(path[:depth])
        for word in branch[2].split():
            if not NAME.match(word):
                break
            children.setdefault(parent, {})[word] = None
            path[depth:] = [word] if word.endswith("/") else []
    return children


def folder(path: Path) -> set[str]:
    """Folders that hold Python files, with a slash, and .py files."""
    folders = {f"{p.name}/" for p in path.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    return folders | {p.name for p in path.glob("*.py")}


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first statement, code) of every block of Python."""
    return [(text[: m.start(2)].count("\n") + 1, m[2]) for m in FENCE.finditer(text) if m[1] == "python"]


def test_the_tree_in_the_readme_is_the_tree() -> None:
    for where, drawn_names in tree(README.read_text()).items():
        drawn, there = set(drawn_names), folder(HOUSE / where)
        assert drawn <= there, f"README.md draws {sorted(drawn - there)} in {where or 'src/quaver/'}; they do not exist"
        # A package's __init__.py goes without saying.
        missing = there - drawn - {"__init__.py"}
        assert not missing, f"README.md does not draw {sorted(missing)} in {where or 'src/quaver/'}"


def run_blocks(page: Path) -> None:
    """Run each block of Python alone, or all in one namespace where the page says so (`CONTINUES`)."""
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


def test_every_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(README)


def test_a_drawing_is_read() -> None:
    assert {where: set(names) for where, names in tree(SAMPLE).items()} == {
        "": {"__init__.py", "core/", "recipes/", "torch/"},
        "core/": {"formats.py", "plan.py", "rules.py"},
        "torch/": {"ops.py"},
    }


def test_a_readme_without_the_drawing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no section"):
        tree("# Quaver\n")
    with pytest.raises(AssertionError, match="no fenced drawing"):
        tree("## The house\nnothing\n## Next\n```\n├── a.py\n```\n")


def test_blocks_of_python_are_found_with_their_lines() -> None:
    blocks = python_blocks(SAMPLE)
    assert [code for _, code in blocks] == ["x = 1\n", "assert x == 1\n"]
    assert [SAMPLE.splitlines()[line - 1] for line, _ in blocks] == ["x = 1", "assert x == 1"]
