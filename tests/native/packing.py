"""Make the same calls in Python and in C, and compare the launches that a driver would receive: bytes, grids, hints.

`python -m tests.native.packing FOLDER --calls 1000` compares with the launches that Python describes. With --launcher
Triton compiles them and its own launcher passes the arguments to the stub driver.
"""

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from quaver.capi.variants import FIELD_BITS
from quaver.torch.backends.gpu import launch, tensorwise
from tests.native import library
from tests.native.calls import LONG, Call, Drawn
from tests.native.launches import Described, Launch, Launched, named
from tests.native.library import Library, Log, exported

#: Arguments that are the caller's memory in C and Python's own in Python.
OWN = {"work", "amax_values"}


class Difference(AssertionError):
    """A launch from C that differs from Python's."""


class Comparison:
    """Compares launches, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.variants = exported(folder)
        self.counts: Counter[str] = Counter()
        self.used: set[int] = set()

    def __call__(self, call: Call, python: list[Launch], entries: list[dict[str, Any]]) -> None:
        zeros = [entry for entry in entries if "memset" in entry]
        _same(call, "bytes filled with zeros", call.zeroed, sum(4 * entry["count"] for entry in zeros))
        entries = [entry for entry in entries if "memset" not in entry]
        _same(call, "kernels", [one.kernel for one in python], [entry["kernel"] for entry in entries])
        for expected, entry in zip(python, entries, strict=True):
            self._compare(call, expected, entry)
        self.counts["calls"] += 1

    def _compare(self, call: Call, expected: Launch, entry: dict[str, Any]) -> None:
        variants = [one for one in self.variants[entry["image"]] if one["kernel"] == entry["kernel"]]
        variant = variants[0]
        launched = named(entry, variant["arguments"], tuple(variant["block"]), variant["key"])
        _same(call, "arguments", list(expected.values), list(launched.values))
        values, own = dict(launched.values), OWN & set(launched.values)
        same = launched.block == expected.block
        if not same:
            # The general variant of a whole matrix at an odd address has smaller blocks.
            self.counts["other blocks"] += 1
            grid = _grid(launched.block, expected)
            _same(call, "grid", grid, launched.grid)
            if "programs" in values:
                _same(call, "programs", grid[0] * grid[1], values["programs"])
                values["programs"] = expected.values["programs"]
        else:
            _same(call, "grid", expected.grid, launched.grid)
        for name, value in expected.values.items():
            if name not in own:
                _same(call, f"{expected.kernel}'s {name}", value, values[name])
        _same(call, "threads", expected.threads, launched.threads)
        key = _without_blocks(expected.key, variant["fields"], same)
        # Variants of several keys may have the same machine code.
        variants = [one for one in variants if _without_blocks(one["key"], one["fields"], same) == key]
        if not variants:
            raise Difference(
                f"{call.text}: {variant['kernel']} has key {launched.key:#x}, Python's is {expected.key:#x}"
            )
        if not any(_holds(one, launched.values) for one in variants):
            raise Difference(f"{call.text}: {variant['kernel']} assumes what is not so: {launched.values}")
        self.counts["launches"] += 1
        self.counts["same machine code"] += expected.image == launched.image
        self.used.add(entry["image"])


def _without_blocks(key: int, fields: list[str], same: bool) -> int:
    """Return a key without what depends on the block, unless blocks are the same, and without a roll's block."""
    for i, field in enumerate(fields):
        if field == "BLOCK" or (field in ("TALL", "BN", "STEPS") and not same):
            key &= ~(2**FIELD_BITS - 1 << FIELD_BITS * i)
    return key


def _grid(block: tuple[int, int], expected: Launch) -> list[int]:
    """Return the grid of Python's launch with other blocks."""
    rows, columns = expected.values["rows"], expected.values["columns"]
    down, across = -(-rows // block[0]), -(-columns // block[1])
    if expected.kernel == "rowwise":
        return [down, 1, 1]
    if expected.kernel in ("activate", "activate_blocks"):
        return [down, across, 1]
    return [down, across, 1] if down > tensorwise.SECOND_AXIS else [across, down, 1]


def _holds(variant: dict[str, Any], values: dict[str, int]) -> bool:
    rows, columns = variant["block"]
    if variant["kernel"] == "rope":
        values = {**values, "rows": values["q_heads"], "columns": values["k_heads"]}
    whole = not variant["whole_blocks"] or (values.get("rows", 0) % rows == 0 and values["columns"] % columns == 0)
    return whole and all(values[name] % 16 == 0 for name in variant["multiples_of_16"])


def _same(call: Call, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Difference(f"{call.text}: {what}: Python has {expected}, C has {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--libraries", nargs="+", type=Path, help="of other folders, with the kernels of this one")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", required=True)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--small", action="store_true", help="E4M3 with powers of two only")
    parser.add_argument("--launcher", action="store_true")
    given = parser.parse_args()
    log = Log(Path(os.environ["STUB_LOG"]))
    python = Launched(log) if given.launcher else Described()
    for path in given.libraries or [given.folder / "libquaver.so"]:
        try:
            result = compared(given, path, python, log)
        except AssertionError as difference:
            result = {"difference": str(difference)}
            python.take()
        print(json.dumps(result))


def compared(given: Any, path: Path, python: Described | Launched, log: Log) -> dict[str, Any]:
    """Compare one library's launches with Python's; returns counts.

    Raises:
        Difference: a launch differs, or a call fails.
    """
    lib = Library(path)
    size = lib.c.quaver_workspace_bytes(max(columns for _, columns in LONG))
    memory = torch.zeros(size + 16, dtype=torch.uint8)
    status = lib.create(memory.data_ptr() + 15 & ~15, size)
    assert status == library.OK, lib.text(status)
    drawn = Drawn(given.seed, given.families, [getattr(torch, name) for name in given.dtypes], given.small)
    compare = Comparison(given.folder)
    for _ in range(given.calls):
        call = drawn()
        launch._forget()
        call.python()
        launches = python.take()
        status = call.c(lib, launches)
        entries = log.read()
        if status != library.OK:
            raise Difference(f"{call.text}: {lib.text(status)}")
        compare(call, launches, entries)
    images = set(compare.variants)
    unused = sorted({f"{v['kernel']} {v['key']:#x}" for i in images - compare.used for v in compare.variants[i]})
    return {**compare.counts, "images": len(images), "used": len(compare.used), "unused": unused}


if __name__ == "__main__":
    main()
