"""Builds a cache for a card that is not there, and sees in a second process that it leaves nothing to compile."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.ahead import cache, hollow
from benchmarks.measuring import stub_driver

ROOT = Path(__file__).resolve().parents[3]

#: Folders with tests marked `gpu`, which the Makefile's target also lists.
TESTS = ("tests/gpu", "tests/kernels", "tests/torch/nn/attention", "tests/torch/backends/gpu")
#: Walks, and the paths of tests; the longest come first, because two run at a time.
WALKS = ("tests", TESTS[:1]), ("benchmark", ()), ("tests", TESTS[1:]), ("rows", ())
#: Walks that a check repeats: tests launch the same functions as the rows, and take most of the time.
CHECKED = ("benchmark", ()), ("rows", ())
#: Number of concurrent walks.
PROCESSES = 2
#: Compilers that Triton searches for its launchers.
COMPILERS = "gcc", "clang", "cc"
#: Variables that change Triton's cache keys, or prevent its use.
FOREIGN = "TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_STORE_BINARY_ONLY", "CC"


def build(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Compile all that runs on cards of these architectures into a folder; returns what was compiled and found."""
    folder.mkdir(parents=True, exist_ok=True)
    cache.settle(folder)
    with environment(folder, compilers=True) as own:
        total = sum((walk_all(arch, own, say, WALKS, failures=True) for arch in archs), Counter[str]())
    say(f"{folder}: {cache.settle(folder)} kernels, {cache.size(folder) / 2**20:.0f} MiB")
    return total


def check(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Repeat `CHECKED` in new processes, with a copy of the cache in another folder and without a C compiler."""
    with tempfile.TemporaryDirectory() as elsewhere:
        copy = Path(elsewhere) / "carried"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*cache.UNUSED))
        cache.settle(copy)
        with environment(copy, compilers=False) as own:
            return sum((walk_all(arch, own, say, CHECKED, failures=False) for arch in archs), Counter[str]())


def check_machine_code(archs: Sequence[int], folder: Path) -> int:
    """Run the gate on the kernels of its rows in a cache; returns its exit code."""
    command = [sys.executable, "-m", "tests.kernels.gate", "--arch", *map(str, archs)]
    with environment(folder, compilers=False) as own:
        return subprocess.run(command, cwd=ROOT, env=own, check=False).returncode


@contextmanager
def environment(folder: Path, compilers: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of a walk whose kernels are in a folder."""
    with tempfile.TemporaryDirectory() as stubs, path_without_compilers() as bare:
        own = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        own |= stub_driver.build(Path(stubs)) | hollow.ENVIRONMENT
        own |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        own["PATH"] = own["PATH"] if compilers else bare
        yield own


def walk_all(
    arch: int,
    environment: dict[str, str],
    say: Callable[[str], None],
    walks: Sequence[tuple[str, Sequence[str]]],
    failures: bool,
) -> Counter[str]:
    """Run walks; returns how many kernels they found in the cache, and how many they compiled.

    Args:
        failures: say which tests and cases fail, instead of what is compiled.
    """

    def walk(name: str, paths: Sequence[str]) -> Counter[str]:
        command = [sys.executable, "-m", "benchmarks.gpu.ahead.walk", name, str(arch), *paths]
        title = " ".join([f"sm_{arch}", name, *paths])
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{title} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
        counts = json.loads(done.stdout.splitlines()[-1])
        compiled, failed, seconds = counts.pop("names"), counts.pop("failed"), counts.pop("seconds")
        for line in failed if failures else [f"was left to compile {kernel}" for kernel in compiled]:
            say(f"{title}: {line}")
        shown = ", ".join(f"{value} {name}" for name, value in counts.items()) or "nothing launched"
        say(f"{title}: {shown}; {seconds:.0f} s of the processor")
        return Counter(counts)

    with ThreadPoolExecutor(PROCESSES) as pool:
        return sum(pool.map(walk, *zip(*walks, strict=True)), Counter[str]())


@contextmanager
def path_without_compilers() -> Iterator[str]:
    """Yield a PATH with all commands except compilers."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in os.environ.get("PATH", "").split(os.pathsep):
            for command in Path(entry).glob("*") if entry and Path(entry).is_dir() else ():
                link = Path(folder) / command.name
                if not command.name.startswith(COMPILERS) and not link.exists() and not link.is_symlink():
                    link.symlink_to(command)
        yield folder
