"""Threads of Python's own that share work on a CPU: foreign calls release the interpreter's lock.

torch's own threads run none of Python. These sleep while there is nothing to do, and are as many as torch may use.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

Unit = TypeVar("Unit")


def share(work: Callable[[Iterator[Unit]], None], units: Sequence[Unit], helpers: int) -> None:
    """Call work in this thread and in so many others, all with one iterator of the units: who is free takes the next.

    Returns once every unit is done. An exception drops the units that are left, and is raised when all have ended.
    """
    left, begun = iter(units), list[Future[None]]()
    for _ in range(helpers):
        try:
            begun.append(_pool(os.getpid()).submit(work, left))
        except RuntimeError:
            # No thread can be started, as when the interpreter ends: this one does all.
            break
    try:
        work(left)
    finally:
        for _ in left:
            pass
        # One that has not begun would find nothing: others keep the pool busy, or a fork has left its threads behind.
        begun = [future for future in begun if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Of this process: a fork inherits none of its parent's threads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "quaver")
