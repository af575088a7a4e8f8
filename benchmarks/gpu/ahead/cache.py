"""Triton's cache as something that can be carried: its lists of files name folders, and are written anew where it lies.

Without that a cache in another folder than it was made in holds nothing: Triton drops every file whose path is gone.
`python -m benchmarks.gpu.ahead.cache DIR` does so for whatever else is to run with TRITON_CACHE_DIR=DIR.
"""

import json
import os
import sys
from pathlib import Path

#: How the name of a list of files begins, in each kernel's folder.
GROUP = "__grp__"


def settle(folder: Path) -> int:
    """Have every list name the files beside it; returns how many kernels there are."""
    kernels = 0
    for path in folder.glob(f"*/{GROUP}*"):
        kernels += 1
        listed = json.loads(path.read_text(encoding="utf-8"))
        paths = {name: str(path.parent / name) for name in listed["child_paths"] if (path.parent / name).exists()}
        if paths == listed["child_paths"]:
            continue
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
        os.replace(partial, path)
    return kernels


def lighten(folder: Path) -> None:
    """Leave out what only people read: a kernel is its machine code and what is said of it."""
    for path in folder.glob("*/*"):
        if path.suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
            path.unlink()
    settle(folder)


def size(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {settle(Path(sys.argv[1]))} kernels")
