"""Make Triton's cache portable: rewrite the absolute paths in its lists of files after the cache was moved.

Otherwise a moved cache would count as empty, because Triton drops every file whose path does not exist.

    python -m benchmarks.gpu.ahead.cache --pack DIR    write DIR.tar.xz, a tenth of the folder's bytes
    python -m benchmarks.gpu.ahead.cache DIR           unpack DIR.tar.xz where DIR is missing, and settle DIR

The second command prepares whatever is to run with TRITON_CACHE_DIR=DIR.
"""

import json
import os
import sys
import tarfile
from pathlib import Path

#: Prefix of the name of the list of files in each kernel's folder.
GROUP = "__grp__"


def settle(folder: Path) -> int:
    """Make every list name the files in its own folder; returns the number of kernels."""
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
    """Delete intermediate code; a kernel only needs its machine code and metadata."""
    for path in folder.glob("*/*"):
        if path.suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
            path.unlink()
    settle(folder)


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def archive_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.xz")


def pack(folder: Path) -> Path:
    """Write a lightened cache as an archive next to its folder."""
    lighten(folder)
    archive = archive_of(folder)
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(folder, arcname=".")
    return archive


def unpack(folder: Path) -> None:
    """Unpack the archive of a folder if the folder is missing."""
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
