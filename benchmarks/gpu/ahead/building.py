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
from itertools import repeat
from pathlib import Path

from benchmarks.gpu.ahead import cache, hollow
from benchmarks.measuring import stub_driver

ROOT = Path(__file__).resolve().parents[3]
#: Where tests marked `gpu` are; the Makefile's target has them too.
TESTS = ("tests/gpu", "tests/kernels", "tests/torch/blocks/attention/implementations", "tests/torch/backends/gpu/gemms")
#: In order: the rest compiles little that the gate's rows have not.
WALKS = "rows", "benchmark", "tests"
MARK = "benchmarks.gpu.ahead: "
#: Walks at a time, where the order allows it.
PROCESSES = 2
#: What Triton looks for to compile its launchers.
COMPILERS = "gcc", "clang", "cc"
#: What Triton's cache goes by, and what would keep it from being used.
FOREIGN = "TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_STORE_BINARY_ONLY", "CC"


def build(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Compile all that runs on cards of these architectures into a folder; returns what was compiled and found."""
    folder.mkdir(parents=True, exist_ok=True)
    cache.settle(folder)
    counts = walked(archs, folder, say, compilers=True)
    cache.lighten(folder)
    say(f"{folder}: {cache.settle(folder)} kernels, {cache.size(folder) / 2**20:.0f} MiB")
    return counts


def check(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Launch the same again in other processes, from a copy elsewhere and with no C compiler in reach."""
    with tempfile.TemporaryDirectory() as elsewhere:
        copy = Path(elsewhere) / "carried"
        shutil.copytree(folder, copy)
        cache.settle(copy)
        return walked(archs, copy, say, compilers=False)


def walked(archs: Sequence[int], folder: Path, say: Callable[[str], None], compilers: bool) -> Counter[str]:
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as stubs, path_without_compilers() as bare:
        library = stub_driver.build(Path(stubs))
        environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        environment |= library | hollow.ENVIRONMENT | {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        environment["PATH"] = environment["PATH"] if compilers else bare
        with ThreadPoolExecutor(PROCESSES) as pool:
            for arch in archs:
                # What the rows launch is most of it: compiled once, not by two processes at once.
                for walks in (WALKS[:1], WALKS[1:]):
                    for walk, (counts, names, failed, seconds) in zip(
                        walks, pool.map(one, walks, repeat(arch), repeat(environment)), strict=True
                    ):
                        total.update(counts)
                        for line in failed if compilers else [f"was left to compile {name}" for name in names]:
                            say(f"sm_{arch} {walk}: {line}")
                        told = ", ".join(f"{value} {name}" for name, value in counts.items()) or "nothing launched"
                        say(f"sm_{arch} {walk}: {told}; {seconds:.0f} s of the processor")
    return total


def one(walk: str, arch: int, environment: dict[str, str]) -> tuple[Counter[str], list[str], list[str], float]:
    """What a walk counts in a process of its own, the kernels that it compiles, what did not come to its end, and the
    processor's seconds.

    Raises:
        RuntimeError: it does not come to its end.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.ahead.walk", walk, str(arch), *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{walk} on sm_{arch} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(lines[-1].removeprefix(MARK))
    names, failed, seconds = told.pop("names"), told.pop("failed"), told.pop("seconds")
    return Counter(told), names, failed, seconds


@contextmanager
def path_without_compilers() -> Iterator[str]:
    """A PATH on which all commands are but compilers."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in os.environ.get("PATH", "").split(os.pathsep):
            for command in Path(entry).glob("*") if entry and Path(entry).is_dir() else ():
                link = Path(folder) / command.name
                if not command.name.startswith(COMPILERS) and not link.exists() and not link.is_symlink():
                    link.symlink_to(command)
        yield folder
