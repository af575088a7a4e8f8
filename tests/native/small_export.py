"""Export kernels for tests: few of them, `python -m tests.native.small_export FOLDER [FAMILY ...]`, or all of them
without machine code, with --uncompiled.
"""

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quaver.capi import export as exporting
from quaver.capi.cases import FAMILIES as EVERY_FAMILY
from quaver.capi.cases import Selection
from quaver.capi.export import CompiledVariant
from quaver.capi.variants import Variant
from quaver.recipes.formats import E4M3

#: Families of the default tests, under half a minute on one core without a cache.
FAMILIES = ("tensor", "mx")
#: Attributes of a kernel in a cubin.
PARAMETER, THREADS = 0x17, 0x10


def uncompiled(found: Sequence[Variant], arch: int, progress: Any = None) -> list[CompiledVariant]:
    """Return variants with cubins that have the sizes of their arguments, by which the stub driver reads them, and no
    machine code.
    """
    return [
        CompiledVariant(one, one.kernel, _cubin(one, number), 32 * one.launch.warps, 0)
        for number, one in enumerate(found)
    ]


def _cubin(variant: Variant, number: int) -> bytes:
    """Return an ELF file of one section about the kernel. number: makes it unlike all others."""
    kinds = [variant.launch.signature[name] for name in variant.arguments]
    sizes = [4 if kind in ("i32", "fp32") else 8 for kind in kinds] + [8, 8]  # and two scratch pointers
    about = struct.pack("<BBHI", 4, THREADS, 4, 32 * variant.launch.warps)
    for i, size in enumerate(sizes):
        about += struct.pack("<BBHIHHI", 4, PARAMETER, 12, 0, i, 0, size << 18)
    names = f"\0.nv.info.{variant.kernel}\0{number}\0".encode()
    at = 64 + len(about)
    table = at + len(names)
    header = b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 2, 0)
    sections = ((0, at, len(names)), (1, 64, len(about)))
    described = (struct.pack("<I20xQQ", *section).ljust(64, b"\0") for section in sections)
    return header + about + names + b"".join(described)


if __name__ == "__main__":
    folder, *families = sys.argv[1:]
    few: dict[str, Any] = {"formats": (E4M3,), "ratios": False, "widths": (256,)}
    if families == ["--uncompiled"]:
        exporting.compile_all, families, few = uncompiled, list(EVERY_FAMILY), {}
    exporting.export([90], Path(folder), Selection(families=tuple(families) or FAMILIES, **few))
