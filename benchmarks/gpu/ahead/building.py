"""Builds a cache for a card that is not there, and sees in a second process that it leaves nothing to compile."""

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from benchmarks.gpu.ahead import cache, hollow
from benchmarks.gpu.ahead.children import NOTED, ROOT, Child
from benchmarks.measuring import stub_driver

#: Where tests marked `gpu` are; the Makefile's target has them too.
TESTS = ("tests/gpu", "tests/kernels", "tests/torch/nn/attention", "tests/torch/backends/gpu")
#: What is walked through, and of tests which paths: those that take longest first, since two run at a time.
WALKS = ("tests", TESTS[:1]), ("benchmark", ()), ("tests", TESTS[1:]), ("rows", ())
#: Walks at a time, and compilers beside them.
PROCESSES = 2
#: What Triton looks for to compile its launchers.
COMPILERS = "gcc", "clang", "cc"
#: What Triton's cache goes by, and what would keep it from being used.
FOREIGN = "TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_STORE_BINARY_ONLY", "CC"


def build(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Compile all that runs on cards of these architectures into a folder; returns what was compiled and found."""
    folder.mkdir(parents=True, exist_ok=True)
    cache.settle(folder)
    with environment(folder, compilers=True) as own:
        total = sum((compiled(arch, own, say) for arch in archs), Counter[str]())
    cache.lighten(folder)
    say(f"{folder}: {cache.settle(folder)} kernels, {cache.size(folder) / 2**20:.0f} MiB")
    return total


def check(archs: Sequence[int], folder: Path, say: Callable[[str], None] = print) -> Counter[str]:
    """Launch the same again in other processes, from a copy elsewhere and with no C compiler in reach."""
    with tempfile.TemporaryDirectory() as elsewhere:
        copy = Path(elsewhere) / "carried"
        shutil.copytree(folder, copy)
        cache.settle(copy)
        with environment(copy, compilers=False) as own:
            return sum((launched(arch, own, say) for arch in archs), Counter[str]())


@contextmanager
def environment(folder: Path, compilers: bool) -> Iterator[dict[str, str]]:
    """Of a walk whose kernels are in a folder."""
    with tempfile.TemporaryDirectory() as stubs, path_without_compilers() as bare:
        own = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        own |= stub_driver.build(Path(stubs)) | hollow.ENVIRONMENT
        own |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        own["PATH"] = own["PATH"] if compilers else bare
        yield own


def launched(arch: int, environment: dict[str, str], say: Callable[[str], None]) -> Counter[str]:
    """What is found and what is compiled where each walk compiles what it lacks."""

    def walked(walk: str, paths: Sequence[str]) -> Counter[str]:
        with Child(walk, arch, environment, paths) as child:
            return child.end(say, failures=False)

    with ThreadPoolExecutor(PROCESSES) as pool:
        return sum(pool.map(walked, *zip(*WALKS, strict=True)), Counter[str]())


def compiled(arch: int, environment: dict[str, str], say: Callable[[str], None]) -> Counter[str]:
    """What is compiled where walks note what they launch and other processes compile it, each kernel once."""
    launches: SimpleQueue[str | None] = SimpleQueue()
    known: set[str] = set()
    new = Lock()

    def recorded(walk: str, paths: Sequence[str]) -> Counter[str]:
        with Child(walk, arch, environment, (*paths, "--note")) as child:
            for line in child.lines(NOTED):
                with new:
                    if line not in known:
                        known.add(line)
                        launches.put(line)
            return child.end(say)

    def compiling(_: int) -> Counter[str]:
        with Child("compile", arch, environment) as child:
            while (line := launches.get()) is not None:
                child.ask(line)
            return child.end(say)

    with ThreadPoolExecutor(PROCESSES) as walking, ThreadPoolExecutor(PROCESSES) as compilers:
        compilings = [compilers.submit(compiling, number) for number in range(PROCESSES)]
        try:
            counts = list(walking.map(recorded, *zip(*WALKS, strict=True)))
        finally:
            for _ in compilings:
                launches.put(None)
        return sum((*counts, *(one.result() for one in compilings)), Counter[str]())


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
