"""The C library that `quaver kernels` writes, with a stub of the CUDA driver that records the launches."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quaver
from tests.native import library, small_export
from tests.native.library import COMPILERS, STUB, build, build_stub, environment, run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no C compiler (gcc or clang) is on the path")
ROOT = Path(__file__).parents[2]
#: The library's families in the small export; `amax` belongs to tensor.
SMALL = "amax", *small_export.FAMILIES
ALL = (
    "amax",
    "tensor",
    "row",
    "block",
    "mx",
    "nv",
    "dequantize",
    "delayed",
    "norm",
    "norm_quantize",
    "activation_quantize",
    "activation",
    "rope",
    "cross_entropy",
    "optimizer",
)


def python(module: str, *arguments: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module of tests in a process of its own, which compiles kernels instead of interpreting them."""
    env = {**os.environ, "TRITON_DISABLE_LINE_INFO": "1", "OMP_NUM_THREADS": "1", **variables, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of few kernels, compiled into libquaver.so."""
    folder = tmp_path_factory.mktemp("small")
    output_of(python("tests.native.small_export", folder))
    build(folder, COMPILERS[0])
    return folder


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of all kernels without machine code, compiled into libquaver.so."""
    folder = tmp_path_factory.mktemp("every")
    output_of(python("tests.native.small_export", folder, "--uncompiled"))
    build(folder, COMPILERS[0])
    return folder


def packed(folder: Path, stub: Path, tmp_path: Path, *options: Any) -> subprocess.CompletedProcess[str]:
    variables = environment(stub, tmp_path / "log")
    return python("tests.native.packing", folder, *options, **variables)


def test_arguments_are_those_that_python_describes(small: Path, stub: Path, tmp_path: Path) -> None:
    counts = json.loads(output_of(packed(small, stub, tmp_path, "--calls", 1000, "--small", "--families", *SMALL)))
    assert counts["calls"] == 1000
    assert counts["launches"] > 1000
    assert counts["unused"] == []


def test_keys_and_arguments_of_every_family_are_those_of_python(every: Path, stub: Path, tmp_path: Path) -> None:
    counts = json.loads(output_of(packed(every, stub, tmp_path, "--calls", 400, "--families", *ALL)))
    assert counts["calls"] == 400
    assert counts["used"] > 250


def test_arguments_are_those_of_tritons_launcher(small: Path, stub: Path, tmp_path: Path) -> None:
    counts = json.loads(
        output_of(packed(small, stub, tmp_path, "--calls", 5, "--small", "--launcher", "--families", *SMALL))
    )
    assert counts["calls"] == 5
    assert counts["same machine code"] > 0


#: Mistakes in the C sources: file, text, and what replaces it.
MUTANTS = [
    ("quaver_quantize.c", "qv_int(call, qv_up(x->columns, 128));", "qv_int(call, qv_up(x->columns, 64));"),
    ("quaver_quantize.c", "if (qt) qv_int(call, 4 * lines(x->rows));", "if (qt) qv_int(call, lines(x->rows));"),
    (
        "quaver_quantize.c",
        "qv_int(call, x->rows), qv_int(call, x->columns)",
        "qv_int(call, x->columns), qv_int(call, x->rows)",
    ),
    (
        "quaver_quantize.c",
        "qv_pointer(call, one->scale), qv_pointer(call, amax);",
        "qv_pointer(call, amax), qv_pointer(call, one->scale);",
    ),
    ("quaver_quantize.c", "QV_MXFP8_COLUMNS_SQUARE(square(one))", "QV_MXFP8_COLUMNS_SQUARE(!square(one))"),
    (
        "quaver_quantize.c",
        "qv_pointer(call, o->factor), qv_pointer(call, o->newest)",
        "qv_pointer(call, o->newest), qv_pointer(call, o->factor)",
    ),
    (
        "quaver.c",
        "if ((v->whole && !whole) || (v->assumes & ~multiples(call))) continue;",
        "if ((v->whole && !whole) || (v->assumes & 0 & ~multiples(call))) continue;",
    ),
    (
        "quaver.c",
        "if ((v->whole && !whole) || (v->assumes & ~multiples(call))) continue;",
        "if ((0 && v->whole && !whole) || (v->assumes & ~multiples(call))) continue;",
    ),
    ("quaver.c", "unsigned)(swapped ? down : across)", "unsigned)(swapped ? across : down)"),
    ("quaver.c", "(uint32_t)(down * across)", "(uint32_t)(down + across)"),
    ("quaver.c", "argument(call, (uintptr_t)p)", "argument(call, (uint32_t)(uintptr_t)p)"),
    ("quaver_layers.c", "QV_ROPE_INTERLEAVED(o.interleaved)", "QV_ROPE_INTERLEAVED(!o.interleaved)"),
    ("quaver_layers.c", "QV_CROSS_ENTROPY_Z_LOSS(o.z_loss != 0)", "QV_CROSS_ENTROPY_Z_LOSS(o.soft_cap != 0)"),
    ("quaver_optim.c", "QV_STEP_FIRST_KIND(o.moments)", "QV_STEP_FIRST_KIND(!o.moments)"),
    ("quaver_optim.c", "row[4] =", "row[6] ="),
    (
        "quaver_layers.c",
        "qv_int(call, grad.stride), qv_int(call, x.stride);",
        "qv_int(call, x.stride), qv_int(call, grad.stride);",
    ),
]


@pytest.mark.slow
def test_mistakes_in_the_library_are_found(every: Path, stub: Path, tmp_path: Path) -> None:
    flags = "-std=gnu11", "-O1", *library.WARNINGS, "-fPIC", "-fvisibility=hidden", f"-I{every}"
    run(COMPILERS[0], *flags, "-c", *[path.name for path in sorted(every.glob("*.[cS]"))], cwd=every)
    objects = {path.stem: path for path in every.glob("*.o")}
    libraries = []
    for number, (name, before, after) in enumerate(MUTANTS):
        source, mutant = (every / name).read_text(), tmp_path / f"mutant{number}.c"
        assert before in source, before
        mutant.write_text(source.replace(before, after))
        others = [path for stem, path in objects.items() if stem != Path(name).stem]
        libraries.append(tmp_path / f"libquaver{number}.so")
        run(COMPILERS[0], *flags, "-shared", mutant, *others, "-o", libraries[-1], "-ldl", "-lpthread")
    options = "--calls", 2000, "--families", *ALL, "--libraries", *libraries
    results = output_of(packed(every, stub, tmp_path, *options)).splitlines()
    found = [bool(json.loads(result).get("difference")) for result in results]
    assert found == [True] * len(MUTANTS), [mutant for mutant, was in zip(MUTANTS, found, strict=True) if not was]


def test_errors_are_codes_and_nothing_is_launched(small: Path, stub: Path, tmp_path: Path) -> None:
    done = python("tests.native.errors", small, **environment(stub, tmp_path / "log"))
    assert int(output_of(done)) >= 120
    assert done.stderr == ""


def test_gemms_are_told_to_cublaslt_as_documented(small: Path, stub: Path, tmp_path: Path) -> None:
    variables = environment(stub, tmp_path / "log", STUB_GEMM_LOG=str(tmp_path / "gemms"))
    done = python("tests.native.gemms", small, **variables)
    assert int(output_of(done)) >= 100
    assert done.stderr == ""


def test_constants_of_cublaslt_are_those_of_its_header(small: Path, tmp_path: Path) -> None:
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if not (include / "cublasLt.h").exists() or not (include / "crt/host_defines.h").exists():
        pytest.skip("no CUDA toolkit is installed, whose cublasLt.h this compares with")
    text = (small / "quaver_cublaslt.h").read_text()
    names = re.findall(r"QV_(CU\w+) =", text)
    checks = [f'_Static_assert((int)QV_{name} == (int){name}, "{name}");' for name in sorted(set(names))]
    checks += ['_Static_assert(sizeof(qv_heuristic) == sizeof(cublasLtMatmulHeuristicResult_t), "heuristic");']
    lines = ["#include <cublasLt.h>", '#include "quaver_cublaslt.h"', *checks]
    (tmp_path / "check.c").write_text("\n".join(lines) + "\n")
    run(COMPILERS[0], "-std=c11", "-fsyntax-only", f"-I{include}", f"-I{small}", tmp_path / "check.c")


def test_without_a_driver_a_handle_is_refused(small: Path) -> None:
    script = "from tests.native.library import *; print(Library(Path('{}')).create(4096, 16))"
    done = subprocess.run(
        [sys.executable, "-c", script.format(small / "libquaver.so")],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    if int(done.stdout) == library.OK:
        pytest.skip("this machine has a CUDA driver")
    assert int(done.stdout) in (library.NO_DRIVER, library.DRIVER)


@pytest.mark.parametrize(
    "compiler, threads, options",
    [
        ("gcc", 1, ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]),
        ("gcc", 2, ["-fsanitize=thread"]),
        ("clang", 2, ["-fsanitize=thread"]),
    ],
)
def test_sanitizers_find_nothing(
    compiler: str, threads: int, options: list[str], small: Path, stub: Path, tmp_path: Path
) -> None:
    if compiler not in COMPILERS:
        pytest.skip(f"{compiler} is not on the path")
    sources = [path.name for path in sorted(small.glob("*.[cS]"))]
    program = tmp_path / "exercise"
    command = compiler, "-std=gnu11", "-O1", "-g", *library.WARNINGS, *options, f"-I{small}", STUB / "exercise.c"
    run(*command, *sources, "-o", program, "-ldl", "-lpthread", cwd=small)
    log = tmp_path / "log"
    done = subprocess.run(
        [program, str(threads)], env=environment(stub, log), capture_output=True, text=True, check=False
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the kernel's address randomization does not suit this compiler's ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert log.read_text().count('"kernel"') > 100 * threads


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_sources_compile_without_warnings(compiler: str, small: Path, tmp_path: Path) -> None:
    if compiler not in COMPILERS:
        pytest.skip(f"{compiler} is not on the path")
    build(small, compiler, str(tmp_path / "libquaver.so"))
    header = small / "quaver.h"
    strict = "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"
    run(compiler, "-std=c99", *strict, "-x", "c", header)
    run(compiler, "-std=c++17", *strict, "-x", "c++", header)


def test_the_example_of_the_guide_compiles(small: Path, tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs/guides").glob("c-api*.md"))
    examples = [code for page in pages for code in re.findall(r"```c\n(.*?)```", page.read_text(), re.DOTALL)]
    examples = [code for code in examples if "<quaver.h>" in code]
    assert examples
    for code in examples:
        (tmp_path / "example.c").write_text(code)
        strict = "-std=c99", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-pedantic", "-Werror"
        run(COMPILERS[0], *strict, "-fsyntax-only", f"-I{small}", tmp_path / "example.c")


def test_the_library_exports_its_functions_only(small: Path) -> None:
    if not shutil.which("nm"):
        pytest.skip("nm is not on the path")
    symbols = {line.split()[-1] for line in run("nm", "-D", "--defined-only", small / "libquaver.so").splitlines()}
    header = (small / "quaver.h").read_text()
    assert symbols
    assert all(f"{symbol}(" in header for symbol in symbols)


def test_a_cmake_project_uses_the_installed_package(small: Path, stub: Path, tmp_path: Path) -> None:
    if not shutil.which("cmake"):
        pytest.skip("cmake is not on the path")
    installed, consumer = tmp_path / "installed", tmp_path / "consumer"
    run("cmake", "-S", small, "-B", tmp_path / "library", f"-DCMAKE_INSTALL_PREFIX={installed}")
    run("cmake", "--build", tmp_path / "library", "--target", "install")
    run("cmake", "-S", STUB / "consumer", "-B", consumer, f"-DCMAKE_PREFIX_PATH={installed}")
    run("cmake", "--build", consumer)
    for program in ("in_c", "in_cpp"):
        version, _, text = run(consumer / program).partition(" ")
        major, minor, patch = map(int, quaver.__version__.split(".")[:3])
        assert int(version) == 10000 * major + 100 * minor + patch
        assert "triton" in text
        assert "ptxas" in text


# ---- everything ----


@pytest.mark.slow
def test_every_variant_gets_the_arguments_that_python_describes(stub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    output_of(python("quaver.train", "kernels", "--arch", "sm_90", "--out", folder))
    build(folder, COMPILERS[0])
    # Families with many kernels are drawn more often.
    often = ["row", "activation_quantize"] * 4
    counts = json.loads(output_of(packed(folder, stub, tmp_path, "--calls", 100000, "--families", *ALL, *often)))
    # Twice the columns of a norm are a multiple of 16, so that its sums need no general variant.
    assert [name for name in counts["unused"] if name != "column_sums 0x2"] == []
    done = packed(folder, stub, tmp_path, "--calls", 30, "--launcher", "--seed", 7, "--families", *ALL)
    assert json.loads(output_of(done))["calls"] == 30
