"""The C and C++ compilers of this machine, and programs that they build from Quaver's headers."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from quaver.include import HEADERS

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-pedantic", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: Language by the ending of its compilers' names, with the oldest standard that is supported.
STANDARDS = {"gcc": "-std=c99", "clang": "-std=c99", "g++": "-std=c++17", "clang++": "-std=c++17"}


def run(*command: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output, standard error included."""
    arguments = [str(part) for part in command]
    return subprocess.run(
        arguments, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def compile_source(compiler: str, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile a source with Quaver's headers in the language of the compiler."""
    language = ("-x", "c++") if compiler.endswith("++") else ()
    include = ("-I", str(HEADERS))
    return run(compiler, STANDARDS[compiler], *WARNINGS, *include, *language, source, *flags)


def build(compiler: str, source: Path, program: Path, *flags: str) -> Path:
    """Return a program built from one source; skip the test if this machine lacks the compiler or its sanitizers."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    if any(flag in SANITIZERS for flag in flags) and not has_sanitizers(compiler):
        pytest.skip(f"{compiler} has no AddressSanitizer")
    done = compile_source(compiler, source, *flags, "-o", str(program))
    assert done.returncode == 0, done.stdout
    return program


@cache
def has_sanitizers(compiler: str) -> bool:
    done = run(compiler, *SANITIZERS, "-x", "c", "-", "-o", "/dev/null", stdin="int main(void) { return 0; }")
    return done.returncode == 0


def any_compiler(*names: str) -> str:
    """Return the first of these compilers that is installed; skip the test if none is."""
    for name in names:
        if shutil.which(name):
            return name
    pytest.skip(f"none of {', '.join(names)} is installed")
