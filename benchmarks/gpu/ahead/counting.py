"""What Triton compiled in a process and what it found in its cache: kernels, and launchers in C."""

from collections import Counter
from typing import Any

from triton import knobs
from triton.runtime import build

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
