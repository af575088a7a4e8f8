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
PAGES = [
    *(page for folder in FOLDERS[:2] for page in sorted(folder.glob("*.md"))),
    *(DOCS / name for name in ("optimizer.md", "quickstart.md", "recipes.md", "install.md", "glossary.md")),
]
#: Of files, not of the web and not within a page.
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
#: What `make test` installs.
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
