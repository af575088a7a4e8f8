"""Pages of docs: their Python blocks run, their links lead to files, and an index lists every page of a folder."""

import re
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.contracts.test_installs import installed_by, packages_of
from tests.contracts.test_readme import FENCE, ROOT, python_blocks, run_blocks

DOCS = ROOT / "docs"
#: Folders whose README lists every page.
FOLDERS = [DOCS / "blocks", DOCS / "guides", DOCS / "lab"]
ALONE = ("glossary", "install", "models", "numerics", "optimizer", "quickstart", "recipes")
PAGES = [
    *(page for folder in FOLDERS[:2] for page in sorted(folder.glob("*.md"))),
    *(DOCS / f"{name}.md" for name in ALONE),
]
#: Pages whose lines are checked: all but the lab, and the table of other libraries' names.
WRAPPED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "lab" and page.name != "names.md"),
]
#: Longest line of prose, and of a code block.
PROSE, CODE = 110, 88
#: Tables and figures that a program writes.
GENERATED = re.compile(r"^<!-- [^\n]*from here -->$.*?^<!-- to here[^\n]*-->$", re.MULTILINE | re.DOTALL)
#: Links to files, not to the web and not within a page.
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
#: Packages that `make test` installs.
TESTED = installed_by("pip install -e '.[dev]'")


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p.read_text())], ids=lambda p: p.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(page.read_text())
    others = sorted(set().union(*(packages_of(code) for _, code in blocks)) - TESTED)
    for name in others:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make test-integrations")
    if others:
        warnings.simplefilter("default")
    # An optimizer of torchao's compiles its step for each parameter: as far as Inductor's graph, without C++.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    run_blocks(page)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_the_index_has_every_page(folder: Path) -> None:
    listed = set(LINK.findall((folder / "README.md").read_text()))
    missing = {p.name for p in folder.glob("*.md")} - listed - {"README.md"}
    assert not missing, f"docs/{folder.name}/README.md does not list {sorted(missing)}"


@pytest.mark.parametrize("page", WRAPPED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_lines_of_a_page_are_short(page: Path) -> None:
    text = GENERATED.sub("", page.read_text())
    code = [line for _, body in FENCE.findall(text) for line in body.splitlines()]
    prose = [line for line in FENCE.sub("", text).splitlines() if not line.startswith(("|", "#", "["))]
    long = [line for line in code if len(line) > CODE] + [line for line in prose if len(line) > PROSE]
    assert not long, "wrap these lines:\n" + "\n".join(long)


def test_changelog_and_contributing_are_short() -> None:
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        assert len((ROOT / name).read_text().splitlines()) <= 120
