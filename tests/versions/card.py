"""A command in the Python, torch and triton that a card's machine has: `python -m tests.versions.card -m MODULE ...`.

Triton's cache key depends on the bytes of its library, which differ between versions of Python. If the card's Python is
not available, the command runs in this one, and prints that.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.versions.installing import ROOT, environment, installed, new, pip, python

#: Versions on the rented machines.
PYTHON, TORCH, TRITON = "3.12", "2.11.0", "3.6.0"
#: Packages that torch, the library and its trainer import, and that run the tests marked `gpu`.
NEEDS = (
    *("filelock", "fsspec", "jinja2", "networkx", "setuptools<82", "sympy", "typing_extensions", "numpy"),
    *("rich", "safetensors", "tokenizers", "typer", "matplotlib", "pytest", "pytest-timeout", "pytest-xdist"),
)
FOLDER = ROOT / ".versions"


def prepared(base: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """A Python that has all of it, and the environment that it needs. Raises: CalledProcessError."""
    own = folder / f"python-{PYTHON}" / "bin" / "python"
    if not (folder / "complete").exists():
        new(base, own.parents[1])
        pip(own, "--no-compile", *NEEDS)
        (folder / "complete").touch()
    return own, environment(*(installed(*one, folder, own) for one in (("torch", TORCH), ("triton", TRITON))))


def main(command: Sequence[str], folder: Path = FOLDER / "card") -> int:
    """Run the arguments of Python; returns the exit code."""
    wanted = f"Python {PYTHON}, torch {TORCH} and triton {TRITON}"
    base, why = python(PYTHON), f"no Python {PYTHON} is here"
    if base is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own, chosen = prepared(base, folder)
            print(f"in {wanted}, as a card's machine has them: {own}", flush=True)
            return subprocess.run([own, *command], env=chosen, check=False).returncode
        except subprocess.CalledProcessError as error:
            why = f"{' '.join(map(str, error.cmd[:4]))} ended with code {error.returncode}"
    print(f"not in {wanted}, as a card's machine has them ({why}), but in Python {sys.version.split()[0]}:", flush=True)
    print("a card's machine finds kernels that were compiled here if it has this Python and this triton", flush=True)
    return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
