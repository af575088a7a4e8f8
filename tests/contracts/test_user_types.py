"""The public API: dir() shows its names, each is exported with its type, and a user's script passes --strict."""

import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quaver
from tests import forked
from tests.contracts.typed import GLOBAL, ROOT, STRICT, mypy, strict

SCRIPT = Path(__file__).with_name("user_script.py")
#: Modules that users import names from.
PUBLIC = [
    "quaver",
    "quaver.comparison",
    "quaver.jax",
    "quaver.jax.linen",
    "quaver.jax.nnx",
    "quaver.recipes",
    "quaver.rules",
    "quaver.torch",
    "quaver.train",
]


def every_public_name() -> str:
    """A script that reveals the type of each public name, module by module."""
    lines = [f"import {module}" for module in PUBLIC]
    return "\n".join(lines + [f"reveal_type({m}.{n})" for m in PUBLIC for n in importlib.import_module(m).__all__])


@pytest.mark.parametrize("module", PUBLIC)
def test_dir_shows_the_public_names_alone(module: str) -> None:
    shown = {name for name in dir(importlib.import_module(module)) if f"{module}.{name}" not in PUBLIC}
    assert shown - {"__version__", "optim", "parallel"} == set(importlib.import_module(module).__all__) - {
        "recipes",
        "rules",
    }


def test_submodules_stay_importable_and_front_ends_are_shown_once_imported() -> None:
    code = "import quaver; before = dir(quaver); import quaver.torch; import quaver.torch.linear.linear as linear\n"
    code += "print('torch' in before, 'torch' in dir(quaver), 'linear' in dir(quaver.torch), linear.Linear.__name__)"
    done = forked.bare("torch").run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False", "Linear"]


def test_packages_of_the_torch_front_end_are_attributes() -> None:
    code = "import sys, quaver.torch as qt; print('quaver.torch.optim' in sys.modules, qt.optim.AdamW.__name__, "
    code += "qt.parallel.gather_quantized.__name__, hasattr(qt, 'optimizers'))"
    done = forked.bare("torch").run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "AdamW", "gather_quantized", "False"]


def mypy_strict(folder: Path, *scripts: Path) -> list[str]:
    """The output of mypy for a user's scripts; it finds the library by its py.typed, as an installed package."""
    configuration = folder / "pyproject.toml"
    configuration.write_text(strict([script.stem for script in scripts]), encoding="utf-8")
    options = [f"--config-file={configuration}", "--no-error-summary", "--hide-error-context"]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = mypy(*options, *map(str, scripts), environment=environment)
    return (done.stdout + done.stderr).splitlines()


def test_strict_matches_mypy_strict() -> None:
    """Except for a warning about sections of a configuration file, which a user's script does not have."""
    done = subprocess.run([sys.executable, "-m", "mypy", "--help"], capture_output=True, text=True, check=True)
    listed = re.search(r"enables the following flags:(.*?)\n  --", done.stdout, re.DOTALL)
    assert listed is not None
    flags = re.sub(r"-\s+", "-", listed[1]).replace("\n", " ")
    names = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", flags)} - {"warn_unused_configs"}
    assert names == {name if value else f"no_{name}" for name, value in STRICT.items()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert all(settings[name] == STRICT[name] for name in (*GLOBAL, "implicit_reexport"))


def test_a_users_script_passes_mypy_strict_and_no_public_name_is_untyped(tmp_path: Path) -> None:
    names = tmp_path / "every_public_name.py"
    names.write_text(every_public_name())
    lines = mypy_strict(tmp_path, names, SCRIPT)
    revealed = [line for line in lines if "Revealed type" in line]
    assert set(lines) == set(revealed), "\n".join(line for line in lines if line not in revealed)
    assert len(revealed) == names.read_text().count("reveal_type")
    untyped = [line for line in revealed if line.endswith('is "Any"')]
    assert not untyped, "\n".join(untyped)


def test_the_users_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "converted 3 to rowwise" in capsys.readouterr().out


def test_the_marker_of_a_typed_package_is_there() -> None:
    assert (Path(quaver.__file__).parent / "py.typed").read_text() == ""
