"""Each page installs all that its Python code and commands need, so that it works in an empty environment."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.test_readme import FENCE, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+(?:(?: as \w+)?, [\w.]+)*)", re.MULTILINE)
INSTALL = re.compile(r"pip install ([^#`\n]+)|`'\.\[([\w,-]+)\]'`")
COMMAND = re.compile(r"^(?:\w+=\S+ )*quaver \w|-m quaver\.train", re.MULTILINE)
PROGRAM = re.compile(r"^(?:python|torchrun .*) (examples/\w+\.py)", re.MULTILINE)
#: Packages that every page may use: README's section "Install" installs the library with PyTorch.
GIVEN = {"torch", "numpy", "quaver"}
#: Packages that modules of Quaver need in addition, by the beginning of their name.
OURS = {
    "quaver.jax.linen": "flax",
    "quaver.jax.nnx": "flax",
    "quaver.jax": "jax",
    "quaver.compat.transformer_engine.jax": "flax",
    "quaver.integrations.huggingface": "transformers",
    "quaver.integrations": None,
}
#: Packages that come with another package and that pages import too.
PACKAGES = {"equinox": {"jax"}, "flax": {"jax"}, "lm-eval": {"lm_eval", "tokenizers", "transformers"}}


def packages_of(code: str) -> set[str]:
    """Packages imported by a program, except the standard library and the given ones."""
    needed = set()
    for line in IMPORT.findall(code):
        for name in (word.split(" as ")[0].strip() for word in line.split(",")):
            ours = next((begin for begin in OURS if f"{name}.".startswith(f"{begin}.")), None)
            needed.add(name.split(".")[0] if ours is None else OURS[ours] or name.split(".")[2])
    return needed - GIVEN - sys.stdlib_module_names


def needed_by(text: str) -> set[str]:
    """Packages that the code blocks of a page need."""
    needed = set()
    for kind, body in FENCE.findall(text):
        if kind in ("python", "text"):
            needed |= packages_of(body)
        elif kind in ("console", "bash"):
            needed |= {"typer"} if COMMAND.search(body) else set()
            for program in PROGRAM.findall(body):
                needed |= packages_of((ROOT / program).read_text())
    return needed


def installed_by(text: str) -> set[str]:
    """Packages that a page's lines install, with those of our extras."""
    there: set[str] = set()
    for words, extras in INSTALL.findall(text):
        for word in words.replace("'", "").split() if words else [f".[{extras}]"]:
            there |= set(_with_extras(word))
    return there.union(*(PACKAGES.get(name, set()) for name in there))


def _with_extras(requirement: str) -> Iterator[str]:
    name, _, extras = requirement.partition("[")
    name = re.split(r"[<>=!~;\[ ]", name)[0]
    if name not in (".", "quaver"):
        yield name
        return
    for extra in filter(None, extras.rstrip("]").split(",")):
        assert extra in EXTRAS, f"pyproject.toml has no extra {extra!r}"
        for each in EXTRAS[extra]:
            yield from _with_extras(each)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_pages_install_the_packages_they_use(page: Path) -> None:
    text = page.read_text()
    missing = needed_by(text) - installed_by(text)
    assert not missing, f"{page.relative_to(ROOT)} needs {sorted(missing)}, and no pip install on it provides them"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_no_page_installs_from_an_index_that_has_no_quaver(page: Path) -> None:
    """An error message names the extra of the package, since the library is already installed."""
    commands = "".join(body for kind, body in FENCE.findall(page.read_text()) if kind in ("console", "bash"))
    assert not re.search(r"pip install [^#\n]*\bquaver\b", commands), f"{page.name}: pip install -e '.[...]' in a copy"


def test_requirements_and_install_commands_are_read() -> None:
    page = """
```python
import jax, flax as f
from torchao.float8 import config
import quaver.torch as qt
from quaver.integrations.peft import over_codes
```
```console
WANDB_MODE=offline quaver train
```
Then `pip install -e '.[train]' torchao==0.18.0`, or `'.[jax]'`.
"""
    assert needed_by(page) == {"jax", "flax", "torchao", "peft", "typer"}
    assert needed_by(page) - installed_by(page) == {"flax", "peft"}
    assert {"jax", "flax", "optax"} <= installed_by("pip install -e '.[dev]'")
