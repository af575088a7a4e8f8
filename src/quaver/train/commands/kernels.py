"""`quaver kernels`: compile the kernels of the C library ahead of time, on any machine with torch and Triton."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from quaver.recipes.text import suggest
from quaver.train import frameworks

T = TypeVar("T")


def export_kernels(
    arch: str, folder: Path, dtypes: str, widths: str, families: str, compress: bool, progress: Callable[[str], None]
) -> list[str]:
    """Write the C library with the chosen kernels into a folder.

    Args:
        arch, dtypes, widths, families: names separated by commas; no widths and "all" families are all of them.
        compress: as in `quaver.capi.export.export`.
        progress: called with a line about each kernel.

    Returns:
        Lines with variants and bytes of each kernel.

    Raises: ValueError for unknown names, before anything is compiled.
    """
    frameworks.check_installed("torch", "quaver kernels")
    from quaver.capi.cases import DTYPES, FAMILIES, WIDTHS, Selection
    from quaver.capi.export import export
    from quaver.torch.backends.gpu.device import KERNELS, TRAITS

    known_archs = {f"sm_{number}": number for number in TRAITS if number >= KERNELS}
    archs = _named("--arch", arch, known_archs)
    selection = Selection(
        families=tuple(FAMILIES)
        if families == "all"
        else tuple(_named("--families", families, {f: f for f in FAMILIES})),
        dtypes=tuple(_named("--dtypes", dtypes, DTYPES)),
        widths=tuple(_width(text, WIDTHS) for text in _split(widths)) or WIDTHS,
    )
    exported = export(archs, folder, selection, compress, progress)
    lines = []
    for number, compiled in exported.items():
        images = {one.digest: len(one.cubin) for one in compiled}
        lines.append(f"sm_{number}: {len(compiled)} variants, {sum(images.values()) / 2**20:.1f} MiB of machine code")
    build = f"cmake -S {folder} -B {folder}/build -DCMAKE_BUILD_TYPE=Release && cmake --build {folder}/build"
    return [*lines, f"build the library: {build}"]


def _split(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _named(option: str, text: str, known: dict[str, T]) -> list[T]:
    """Return what the names stand for, each once.

    Raises: ValueError for an unknown name or none.
    """
    names = list(dict.fromkeys(_split(text)))
    if not names:
        raise ValueError(f"{option} names nothing; give one or more of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} has no {name!r}; {suggest(name, known)}")
    return [known[name] for name in names]


def _width(text: str, known: Sequence[int]) -> int:
    """Return the smallest known width that holds rows of this length."""
    longest = max(known)
    if not text.isdecimal() or not 0 < int(text) <= longest:
        raise ValueError(f"--widths has {text!r}; give row lengths from 1 to {longest}")
    return next(width for width in known if width >= int(text))
