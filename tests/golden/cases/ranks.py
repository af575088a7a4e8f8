"""Two ranks over gloo: sharded, tensor, sequence, vocabulary, context, expert and pipeline parallel training.

`tests.golden.ranks` has the cases. One start of two processes runs them all; where a case fails, which may leave the
other rank in a collective, both are started again for the cases after it.
"""

import functools
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import spawn
from tests.golden.ranks import CASES
from tests.golden.record import Record

#: Cases to run, which `tests.golden.__main__` may narrow before it calls the first one.
selected: list[str] = list(CASES)


def cases() -> dict[str, Callable[[Record], None]]:
    return {name: partial(recorded, name) for name in CASES}


def recorded(name: str, record: Record) -> None:
    found = results()[name]
    if isinstance(found, str):
        raise RuntimeError(found)
    fixed, sums = found
    record.exact(**fixed)
    record.sum(**sums)


@functools.cache
def results() -> dict[str, Any]:
    """By case, its results on both ranks, or why it failed."""
    found: dict[str, Any] = {}
    left = list(selected)
    while left:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "cases.json").write_text(json.dumps(left))
            why = ""
            try:
                spawn.run("tests.golden.ranks", folder)
            except RuntimeError as error:
                why = str(error)
            done = [name for number, name in enumerate(left) if all(_files(folder, number, rank) for rank in range(2))]
            for number, name in enumerate(left[: len(done)]):
                found[name] = _read(folder, number)
            left = left[len(done) :]
            if left:
                found[left.pop(0)] = why or "the ranks ended without a word"
    return found


def _files(folder: Path, number: int, rank: int) -> bool:
    return (folder / f"{number}.{rank}.done").exists()


def _read(folder: Path, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds: list[dict[str, Any]] = [{}, {}]
    for rank in range(2):
        for kind, into in zip(("fixed", "sums"), kinds, strict=True):
            with np.load(folder / f"{number}.{rank}.{kind}.npz") as file:
                into |= {f"rank {rank} {name}": file[name] for name in file.files}
    return kinds[0], kinds[1]
