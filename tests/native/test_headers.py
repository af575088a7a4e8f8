"""The headers for their users: statuses, the C++ wrapper, flags that they reject, CMake, and the page's examples."""

import shutil
import sys
from pathlib import Path

import pytest

from quaver.include import CMAKE, HEADERS
from tests.contracts.test_readme import FENCE, ROOT
from tests.native.compilers import HERE, SANITIZERS, STANDARDS, any_compiler, build, compile_source, run

BLOCKS = FENCE.findall((ROOT / "docs" / "guides" / "c-api.md").read_text())
#: Programs of the page with the output that it shows.
EXAMPLES = [
    (kind, code, next(output for other, output in BLOCKS[number:] if other == "text"))
    for number, (kind, code) in enumerate(BLOCKS)
    if kind in ("c", "cpp") and "<quaver.h>" not in code
]
COMPILERS = {"c": ["gcc", "clang"], "cpp": ["g++", "clang++"]}


@pytest.mark.parametrize("compiler", STANDARDS)
def test_a_wrong_call_returns_a_status(compiler: str, tmp_path: Path) -> None:
    flags = SANITIZERS if compiler == "gcc" else ("-O3",)
    done = run(build(compiler, HERE / "interface.c", tmp_path / "program", *flags, "-lm"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_wrapper_agrees_with_the_header(compiler: str, tmp_path: Path) -> None:
    done = run(build(compiler, HERE / "wrapper.cpp", tmp_path / "program", "-O1", *SANITIZERS))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
@pytest.mark.parametrize("compiler", STANDARDS)
def test_inexact_arithmetic_is_an_error_when_compiling(compiler: str, flag: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = compile_source(compiler, HERE / "interface.c", flag, "-fsyntax-only")
    assert done.returncode != 0 and "needs IEEE arithmetic" in done.stdout


@pytest.mark.parametrize("flag", ["-funsafe-math-optimizations", "-freciprocal-math", "-fno-signed-zeros"])
@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_a_part_of_fast_math_is_an_error_of_gcc(compiler: str, flag: str) -> None:
    """Clang, and GCC before 12, do not tell the program."""
    if shutil.which(compiler) is None or int(run(compiler, "-dumpversion").stdout.partition(".")[0]) < 12:
        pytest.skip(f"no {compiler} of version 12 or later is installed")
    done = compile_source(compiler, HERE / "interface.c", flag, "-fsyntax-only")
    assert done.returncode != 0 and "needs IEEE arithmetic" in done.stdout


def test_excess_precision_is_an_error_when_compiling(tmp_path: Path) -> None:
    compiler = any_compiler("gcc", "clang")
    source = tmp_path / "x87.c"
    source.write_text(
        '#include <float.h>\n#undef FLT_EVAL_METHOD\n#define FLT_EVAL_METHOD 2\n#include "quaver_numerics.h"'
    )
    done = compile_source(compiler, source, "-fsyntax-only")
    assert done.returncode != 0 and "evaluated in float" in done.stdout


@pytest.mark.parametrize("kind, code, output", EXAMPLES, ids=[kind for kind, _, _ in EXAMPLES])
def test_an_example_of_the_page_prints_what_the_page_shows(kind: str, code: str, output: str, tmp_path: Path) -> None:
    source = tmp_path / f"example.{kind}"
    source.write_text(code)
    done = run(build(any_compiler(*COMPILERS[kind]), source, tmp_path / "program"))
    assert (done.returncode, done.stdout) == (0, output)


@pytest.mark.parametrize(
    ("language", "options"),
    [("C", f"-Dquaver_DIR={CMAKE}"), ("CXX", f"-DCMAKE_PREFIX_PATH={HEADERS}")],
    ids=["C", "CXX"],
)
def test_cmake_finds_the_headers(options: str, language: str, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    any_compiler(*(["gcc", "clang"] if language == "C" else ["g++", "clang++"]))
    name = "main.c" if language == "C" else "main.cpp"
    include = "quaver_numerics.h" if language == "C" else "quaver.hpp"
    (tmp_path / name).write_text(
        f"#include <{include}>\nint main(void) {{ return qvn_encode(1.0f, &QVN_E4M3) != 0x38; }}"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(user LANGUAGES {language})\n"
        "find_package(quaver 0.2 REQUIRED)\nfind_package(quaver 0.2 REQUIRED)\n"
        f"add_executable(user {name})\ntarget_link_libraries(user PRIVATE quaver::numerics)\n"
    )
    configured = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", options)
    assert configured.returncode == 0, configured.stdout
    built = run("cmake", "--build", tmp_path / "build")
    assert built.returncode == 0 and run(tmp_path / "build" / "user").returncode == 0, built.stdout


def test_cmake_takes_versions_with_the_same_interface(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    for version, found in (("0.2", True), ("0.2.1", False), ("0.1", False), ("1.0", False)):
        (tmp_path / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.18)\nproject(user LANGUAGES NONE)\n"
            f"find_package(quaver {version} REQUIRED)\n"
        )
        done = run("cmake", "-S", tmp_path, "-B", tmp_path / f"build{version}", f"-Dquaver_DIR={CMAKE}")
        assert (done.returncode == 0) == found, f"version {version!r}:\n{done.stdout}"


def test_the_module_prints_the_folders() -> None:
    module = (sys.executable, "-m", "quaver.include")
    assert run(*module).stdout.strip() == str(HEADERS) and (HEADERS / "quaver_numerics.h").is_file()
    assert run(*module, "--cmake").stdout.strip() == str(CMAKE) and (CMAKE / "quaver-config.cmake").is_file()
