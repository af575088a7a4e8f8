"""The C header computes the bits of `quaver.reference`, whatever the compiler, its language and its optimizations."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.native import cases
from tests.native.compilers import HERE, SANITIZERS, STANDARDS, build, run

OPTIMIZATIONS = {"O0": ["-O0"], "O2": ["-O2"], "O3": ["-O3", "-march=native", "-ffp-contract=fast"]}


#: Each compiler, fully optimized or not; the other pairs are slow.
QUICK = ("gcc-O3", "clang-O3", "g++-O2", "clang++-O3")


def builds(*, slow: bool) -> list[object]:
    """Return every (compiler, optimization)."""
    ids = [f"{compiler}-{level}" for compiler in STANDARDS for level in OPTIMIZATIONS]
    marks = [pytest.mark.slow if slow or name not in QUICK else () for name in ids]
    return [pytest.param(*name.split("-"), marks=mark, id=name) for name, mark in zip(ids, marks, strict=True)]


def written(thorough: bool) -> Iterator[Path]:
    """Yield a file of records, which is deleted afterwards: it has hundreds of megabytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        cases.write(path, thorough)
        yield path


@pytest.fixture(scope="module")
def records() -> Iterator[Path]:
    yield from written(thorough=False)


@pytest.fixture(scope="module")
def many_records() -> Iterator[Path]:
    yield from written(thorough=True)


def check(program: Path, records: Path, encodes: int, operands: int) -> None:
    """Run the comparison, and check that it compared as much as it should."""
    done = run(program, records)
    assert done.returncode == 0 and done.stdout.startswith("formats "), done.stdout[-2000:]
    counts = dict(zip(done.stdout.split()[::2], map(int, done.stdout.split()[1::2]), strict=True))
    assert min(counts.values()) > 0 and counts["encodes"] > encodes and counts["operands"] >= operands, counts


@pytest.mark.parametrize("compiler, level", builds(slow=False))
def test_the_header_has_the_bits_of_the_reference(compiler: str, level: str, records: Path, tmp_path: Path) -> None:
    program = build(compiler, HERE / "numerics.c", tmp_path / "program", *OPTIMIZATIONS[level])
    check(program, records, encodes=4_000_000, operands=4000)


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=pytest.mark.slow)])
def test_the_header_stays_within_memory_and_defined_behaviour(compiler: str, records: Path, tmp_path: Path) -> None:
    program = build(compiler, HERE / "numerics.c", tmp_path / "program", "-O1", *SANITIZERS)
    check(program, records, encodes=4_000_000, operands=4000)


@pytest.mark.parametrize("compiler, level", builds(slow=True))
def test_the_header_has_the_bits_of_the_reference_on_many_values(
    compiler: str, level: str, many_records: Path, tmp_path: Path
) -> None:
    program = build(compiler, HERE / "numerics.c", tmp_path / "program", *OPTIMIZATIONS[level])
    check(program, many_records, encodes=50_000_000, operands=36_000)
