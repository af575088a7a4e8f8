"""Set up every test: one thread, fixed seeds, uninitialized memory full of NaN, no GPU tests without a GPU."""

import ctypes
import gc
import importlib
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# JAX's tests spend most of their time on compiling, here and in processes that they start; see OPTIMIZED.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Inductor compiles in this process: its pool, one for each process that compiles, first imports torch once more.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# And takes the processor's word for its vectors: trying them is a program of C++ and a process of Python.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Nor does its C++ say which line an instruction is of, a sixth of the time of a program.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")
# Nor does Dynamo look for garbage after each graph, a twentieth of a second: that is done after each file.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Where cuBLAS keeps its work in deterministic mode, which every test runs in; it is read when the first GEMM runs.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

#: Megabytes that a worker may grow by before it gives back, between two files of tests, what compilers keep.
GROWTH = 1500

#: Objects and collections between two collections of garbage, by generation: tracing makes millions of objects that
#: stay, over which Python's own 700 would walk 30 times as often.
RARELY = 20_000, 10, 10

#: Cases whose names are other ones in each worker: objects by their addresses, and tensors.
NAMED_BY_A_VALUE = re.compile(r" at 0x|\btensor\(")

ROOT = Path(__file__).parents[1]
#: Tests of kernels: on a machine with a GPU they run there, and `pytest -m gpu` takes them.
ON_A_GPU = ("tests/kernels/",)
#: Tests of kernels interpreted on a CPU.
INTERPRETED = (
    "tests/torch/backends/gpu/",
    "tests/torch/linear/test_plan_gpu.py",
    "tests/torch/state/history/test_newest.py",
    "tests/benchmarks/test_gpu.py",
    "tests/kernels/test_interpreter.py",
)
#: The static gate needs neither.
ANYWHERE = ("tests/kernels/test_gate.py", "tests/kernels/gate/")
#: Files of single cases that take long: they begin first, for one that began last would leave the other worker idle.
#: mypy's two stand side by side, since the second reads the cache of the first.
LONGEST = (
    "tests/kernels/test_gate.py",
    "tests/contracts/test_lint.py",
    "tests/contracts/test_user_types.py",
    "tests/jax/operations/test_sharding.py",
    "tests/torch/test_settings.py",
    "tests/torch/test_compile.py",
    "tests/train/",
)
#: Files whose claims an optimizer could break, the bits and bounds of both frameworks: XLA compiles as for a user.
OPTIMIZED = (
    "tests/contracts/",
    "tests/jax/numerics/test_quantize.py",
    "tests/jax/numerics/test_states.py",
    "tests/jax/optim/test_bits.py",
    "tests/jax/test_compiled.py",
    "tests/jax/test_lowering.py",
)
#: The variable that holds the folder of the XLA programs of this run.
PROGRAMS = "QUAVER_TESTS_PROGRAMS"
#: The key of a report of what passed, in what workers send.
PASSED = "passed"
#: Raised inside torch by its own code on the first compilation or forward-mode derivative: a DeprecationWarning up to
#: torch 2.13, a FutureWarning since.
TORCHS_OWN = "ignore:.torch.jit.script.*. is deprecated"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", TORCHS_OWN)
    # Dynamo's, of that version of Python alone.
    config.addinivalue_line("filterwarnings", "ignore:Guards may run slower on Python 3.13.0")
    # What nobody reads is not printed; pytest's own handler is left out, since it visits every logger six times a case.
    logging.getLogger().addHandler(logging.NullHandler())
    if PROGRAMS not in os.environ:
        os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="quaver-tests-")
        config.add_cleanup(forget_programs)
        hold_open(config)
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        begin()


def hold_open(config: pytest.Config) -> None:
    """Hold a pipe open: the processes that programs are forked from (tests/forking.py) run until it is closed."""
    if sys.platform == "linux":
        pipe = Path(os.environ[PROGRAMS], "alive")
        os.mkfifo(pipe)
        config.add_cleanup(partial(os.close, os.open(pipe, os.O_RDWR)))


def forget_programs() -> None:
    shutil.rmtree(os.environ.pop(PROGRAMS), ignore_errors=True)


def begin() -> None:
    """Set up a process that collects and runs tests."""
    import torch

    torch.set_num_threads(1)
    # Kernels are interpreted where there is no GPU; Triton chooses when a kernel is defined, so before any is imported.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            # torch.manual_seed records the stack for every uninitialized kind of device: milliseconds under pytest.
            absent.traceback = SimpleNamespace(format_stack=list)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreting import spare

        spare()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report: pytest.TestReport | pytest.CollectReport) -> Iterator[None]:
    """Send reports of passed tests as one string: xdist serializes a dict entry by entry, in twice the time."""
    data = yield
    return {PASSED: json.dumps(data)} if report.passed else data


@pytest.hookimpl(wrapper=True)
def pytest_report_from_serializable(data: dict[str, Any]) -> Iterator[None]:
    if PASSED in data:
        data.update(json.loads(data.pop(PASSED)))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if unnamed := [item.nodeid for item in items if NAMED_BY_A_VALUE.search(item.nodeid)]:
        # Addresses and random numbers differ between workers, and xdist needs the same cases in all. For an error in
        # a worker xdist reports only that it ended.
        message = f"cases are named by addresses or tensors; give them others of `ids`: {unnamed}"
        print(message, file=sys.__stderr__, flush=True)
        raise pytest.UsageError(message)
    for item in items:
        place_on_a_machine(item, torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1")
    items.sort(key=order)


@cache
def place(path: Path) -> str:
    """The path of a test file in the repository; cached, since a file has about fifty cases."""
    return path.relative_to(ROOT).as_posix()


def order(item: pytest.Item) -> int:
    """Sort key: position of the file in LONGEST, then tests that start ranks, then all others in their order."""
    path = place(item.path)
    least = len(LONGEST) + (item.get_closest_marker("ranks") is None)
    return next((at for at, longest in enumerate(LONGEST) if path.startswith(longest)), least)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Disable garbage collection while tests are collected: it took a quarter of that time and frees nothing."""
    gc.disable()
    try:
        if hasattr(session.config, "workerinput"):
            import_tests(session.config)
        return (yield)
    finally:
        gc.enable()


def import_tests(config: Any) -> None:
    """Import all test files, starting from a different one in each worker, so that each reads bytecode that others have
    written. Otherwise every worker would rewrite the assertions of all files at the same time."""
    paths = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
    first = int(config.workerinput["workerid"].removeprefix("gw")) * len(files) // config.workerinput["workercount"]
    # Capture what libraries print at import, as pytest does.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    for file in files[first:] + files[:first]:
        # Errors of imports are reported when the file is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(place(file.resolve()).removesuffix(".py").replace("/", "."))
    capture.suspend_global_capture()
    capture.read_global_capture()


def pytest_collection_finish() -> None:
    """Exclude modules and cases from garbage collection: they live until the end, and visiting them takes seconds."""
    if "jax" in sys.modules:
        compile_quickly()
    gc.set_threshold(*RARELY)
    gc.collect()
    gc.freeze()


def compile_quickly() -> None:
    """Add QUICK to JAX's compile options, except in files of OPTIMIZED; JAX has no public setting for that. Also let
    workers share compiled programs, with other workers and between functions."""
    import jax
    from jax._src import compilation_cache, compiler, lru_cache

    from tests.xla_options import QUICK

    share_contexts()
    lru_cache.LRUCache.put = put_at_once
    if hasattr(compilation_cache, "zlib"):
        # The files live as long as the run, and compressing them takes longer than writing them.
        packing = SimpleNamespace(
            compress=partial(zlib.compress, level=0), decompress=zlib.decompress, error=zlib.error
        )
        compilation_cache.zlib = packing
    jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    own = compiler.get_compile_options

    def quick(*args: Any, **options: Any) -> Any:
        chosen = own(*args, **options)
        if jax.config.read("jax_disable_most_optimizations"):
            chosen.env_option_overrides = [*QUICK.items(), *chosen.env_option_overrides]
        return chosen

    compiler.get_compile_options = quick


def share_contexts() -> None:
    """Lower the programs of a file in one MLIR context: JAX makes one for each, a quarter of the time of a single
    operation. MLIR contexts are thread-safe; a version of JAX without this name makes its own."""
    from jax._src.interpreters import mlir

    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = cache(mlir.make_ir_context)


def forget_contexts() -> None:
    """Drop the shared context, which stores every type and constant that was requested from it."""
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    forget = getattr(getattr(mlir, "make_ir_context", None), "cache_clear", None)
    if forget is not None:
        forget()


def put_at_once(cache: Any, key: str, value: bytes) -> None:
    """Write a cache entry atomically, so that no other worker reads a part of it; JAX does not ensure that."""
    whole = Path(cache.path, f"{key}-cache")
    part = whole.with_name(f"{whole.name}-{os.getpid()}")
    part.write_bytes(value)
    part.rename(whole)


def place_on_a_machine(item: pytest.Item, gpu: bool, interpreting: bool) -> None:
    """Mark what `-m gpu` should take on a machine with a GPU, and skip what this one cannot run."""
    path = place(item.path)
    if not gpu:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    elif path.startswith(INTERPRETED) and not item.get_closest_marker("gpu"):
        if not interpreting:
            item.add_marker(pytest.mark.skip(reason="interprets kernels on a CPU: set TRITON_INTERPRET=1"))
    elif path.startswith(ON_A_GPU) and not path.startswith(ANYWHERE):
        item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _alike() -> None:
    """Fix the random seed, and let torch.empty return NaN (255 in bytes), so that unwritten elements are detected."""
    if "quaver.torch.linear.linear" in sys.modules:
        # Plans outlive a test, and the next test may change their conditions.
        sys.modules["quaver.torch.linear.linear"].plans.clear()
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if not torch.are_deterministic_algorithms_enabled():
        # Which imports Dynamo.
        torch.use_deterministic_algorithms(True)
        leave_guards_untimed()


def leave_guards_untimed() -> None:
    """Dynamo empties the processor's caches to time the guards of each graph, 0.03 s; torch has no setting for that."""
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True, scope="module")
def _optimized_where_that_is_the_claim(request: pytest.FixtureRequest) -> Iterator[None]:
    if "jax" not in sys.modules or not place(request.path).startswith(OPTIMIZED):
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    # Single operations compiled by other files are cached too.
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def _held() -> list[float]:
    """Megabytes used by this process when its first test began, or after it last released memory."""
    return [resident()]


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_goes(_held: list[float]) -> Iterator[None]:
    """Free code compiled by JAX and Dynamo after each test file; no other file uses it, and it takes gigabytes."""
    yield
    forget_contexts()
    if "torch._dynamo" in sys.modules:
        # It counts the compilations of a function over all files, and gives up after eight.
        sys.modules["torch"]._dynamo.reset()
    if resident() > _held[0] + GROWTH:
        gc.unfreeze()
        give_back()
        _held[0] = resident()
    # A collection walks over what has come since the last of these, not over gigabytes of cases and compiled code.
    gc.collect()
    gc.freeze()


def resident() -> float:
    """Resident megabytes of this process; 0 where unknown."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return 0.0
    return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def give_back() -> None:
    """Forget what compilers keep, and give its memory to the system, which free alone does not."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
