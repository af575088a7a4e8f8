"""Triton's cache as something that can be carried: its lists of files name folders, and are written anew where it lies.

Without that a cache in another folder than it was made in holds nothing: Triton drops every file whose path is gone.

    python -m benchmarks.gpu.ahead.cache --pack DIR    write DIR.tar.xz, a tenth of the folder's bytes
    python -m benchmarks.gpu.ahead.cache DIR           unpack DIR.tar.xz where DIR is missing, and settle DIR

The second command prepares whatever is to run with TRITON_CACHE_DIR=DIR.
"""

import json
import os
import sys
import tarfile
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


def archive_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.xz")


def pack(folder: Path) -> Path:
    """Write a lightened cache beside its folder as one archive."""
    lighten(folder)
    archive = archive_of(folder)
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(folder, arcname=".")
    return archive


def unpack(folder: Path) -> None:
    """Make the folder of its archive, where it is missing."""
    if folder.exists() or not archive_of(folder).exists():
        return
    with tarfile.open(archive_of(folder)) as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    given = Path(sys.argv[-1])
    if "--pack" in sys.argv[1:]:
        packed = pack(given)
        print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB of {size(given) / 2**20:.1f}")
    else:
        unpack(given)
        print(f"{given}: {settle(given)} kernels")
