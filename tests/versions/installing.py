"""Several versions of torch and triton on one machine, and the environment of a process that uses a pair of them.

They are installed into a folder without their dependencies, which the current Python has. PyPI's builds of torch
with CUDA are given stand-ins for CUDA's libraries (`tests.versions.stand_ins`); with
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu no stand-ins are needed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.versions import stand_ins

ROOT = Path(__file__).parents[2]
#: Variables of the parent process that must not reach kernels, stubs or a dry run.
FOREIGN = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "VIRTUAL_ENV")


def pythons(version: str) -> Iterator[str]:
    """Where a Python of this version, such as "3.12", may be: this one, on the path, pyenv's."""
    if sys.version.startswith(f"{version}."):
        yield sys.executable
    if (named := shutil.which(f"python{version}")) is not None:
        yield named
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))


def python(version: str) -> str | None:
    """The first that runs; pyenv also has names of versions that are not installed."""
    for path in pythons(version):
        if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    return None


def new(base: str, place: Path) -> None:
    """Make an environment of a Python there. Raises: CalledProcessError."""
    subprocess.run([base, "-m", "venv", place], check=True)


def pip(python: str | Path, *arguments: str | Path) -> None:
    """Install without the constraints of this checkout, which name one version of each. Raises: CalledProcessError."""
    # Empty rather than absent, so that constraints of the machine's own do not hold either.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, env=environment)


def installed(package: str, version: str, folder: Path, python: str | Path = sys.executable) -> Path:
    """The folder of this version, installed by a Python's pip if it is missing."""
    place = folder / f"{package}-{version}"
    if not (place / package / "__init__.py").exists():
        pip(python, "--no-deps", "--no-compile", "--target", place, f"{package}=={version}")
    return place


def environment(torch: Path, triton: Path) -> dict[str, str]:
    """Of a process that has these versions."""
    chosen = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    chosen |= {"PYTHONPATH": os.pathsep.join(map(str, (torch, triton, ROOT / "src", ROOT))), "OMP_NUM_THREADS": "1"}
    libraries = torch / "torch" / "lib"
    if (libraries / "libtorch_cuda.so").exists():
        folder = torch / "stand-ins"
        if not (folder / stand_ins.UNVERSIONED).exists():
            stand_ins.make(libraries, folder)
        paths = [str(folder), chosen.get("LD_LIBRARY_PATH", "")]
        chosen["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        chosen["LD_PRELOAD"] = str(folder / stand_ins.UNVERSIONED)
    return chosen
