"""The threads by which torch's operations share work on a CPU, lent to work of Python's that releases its lock.

torch's threads are a team of OpenMP's, and wait for the next operation actively, each on a core of its own: threads of
another kind, woken right after an operation, find those cores taken for milliseconds. So the team itself is asked, by
the call that a compiler makes of `#pragma omp parallel` (libgomp's ABI, which LLVM's library has too). It is taken from
what libtorch was linked with; where that has no such call, and in a fork, whose parent's team is gone, the caller works
alone.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

Unit = TypeVar("Unit")
_PARALLEL = "GOMP_parallel"
#: What a thread of the team runs, given an address that nothing reads.
_Inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_process = os.getpid()


def share(work: Callable[[Iterator[Unit]], None], units: Sequence[Unit], helpers: int) -> None:
    """Call work in this thread and in so many others, all with one iterator of the units: who is free takes the next.

    Returns once every unit is done. An exception drops the units that are left, and is raised when all have ended.
    """
    left, errors = iter(units), list[BaseException]()
    parallel = _parallel() if helpers and os.getpid() == _process else None
    if parallel is None:
        return work(left)

    def inside(_: int) -> None:
        # ctypes would print what is raised here, an interrupt too, and go on.
        try:
            work(left)
        except BaseException as error:
            errors.append(error)
            for _unit in left:
                pass

    parallel(_Inside(inside), None, helpers + 1, 0)
    if errors:
        raise errors[0]


@cache
def _parallel() -> Any | None:
    """GOMP_parallel(what, its argument, threads, flags), or None."""
    try:
        parallel = libtorch()[_PARALLEL]
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [_Inside, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def libtorch() -> ctypes.CDLL:
    """What torch computes with on a CPU, and through it all that it was linked with. Raises: OSError."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
