"""What a process launches: counted as Triton compiles it or finds it in its cache, or noted for another to compile.

Walks that note wait for no compiler, and no two of them compile one kernel.
"""

import base64
import importlib
import io
import os
import pickle
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from triton import JITFunction, knobs
from triton.runtime import build

from benchmarks.gpu.ahead.children import DONE, NOTED
from quaver.torch.backends.gpu import launch

#: kernels compiled, kernels found, launchers compiled.
counts: Counter[str] = Counter()
#: Names of the kernels that were compiled.
compiled: list[str] = []


def count() -> None:
    """From now on."""
    knobs.compilation.listener = _kernel
    original = build._build

    def built(*args: Any, **options: Any) -> Any:
        counts["launchers compiled"] += 1
        return original(*args, **options)

    build._build = built


def _kernel(*, src: Any, cache_hit: bool, **_: Any) -> None:
    counts["kernels found" if cache_hit else "kernels compiled"] += 1
    if not cache_hit:
        compiled.append(f"{src.name} {src.signature} {src.constants} {src.attrs}")


class Pickler(pickle.Pickler):
    """Kernels by their names, since other processes have their own. Raises: ValueError for one that is not quaver's."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return NotImplemented
        if not value.__module__.startswith("quaver."):
            raise ValueError(f"{value.__module__} may be no module elsewhere")
        return kernel, (value.__module__, value.__name__)


def kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def written(one: launch.KernelLaunch) -> str:
    """A launch as text. Raises: ValueError where a kernel is not quaver's."""
    memory = io.BytesIO()
    Pickler(memory).dump(one)
    return base64.b64encode(memory.getvalue()).decode()


def read(text: str) -> launch.KernelLaunch:
    one: launch.KernelLaunch = pickle.loads(base64.b64decode(text))
    # Made anew, since a launch hashes its kernel when it is made and not when it is read.
    return replace(one)


class Elsewhere:
    """In the place of a kernel that another process compiles."""


def note() -> None:
    """Print launches from now on, each once; only what the tests have for themselves is compiled here."""
    recorded: dict[Any, launch._LoadedKernel] = {}
    compile_here = launch._loaded
    # Of its own, since pytest takes the standard output for itself.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)

    def loaded(one: launch.KernelLaunch, index: int) -> launch._LoadedKernel:
        if one.kernel not in recorded:
            try:
                # On a line of its own, whatever pytest has begun.
                lines.write(f"\n{NOTED}{written(one)}\n")
            except ValueError:
                recorded[one.kernel] = compile_here(one, index)
            else:
                recorded[one.kernel] = launch._LoadedKernel(Elsewhere(), lambda *_: None, None, ())
        return recorded[one.kernel]

    launch._loaded = loaded


def compile_noted() -> list[str]:
    """Compile launches from lines of the standard input, answering each; returns which failed, and how."""
    failed = []
    for line in sys.stdin:
        one = read(line.removeprefix(NOTED))
        try:
            launch._loaded(one, 0)
        except Exception as error:
            failed.append(f"{one.fn.__name__} is not compiled: {type(error).__name__}: {str(error)[:300]}")
        print(DONE, flush=True)
    return failed
