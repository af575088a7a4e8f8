"""Make Triton's cache portable: rewrite the absolute paths in its lists of files after the cache was moved.

Otherwise a moved cache would count as empty, because Triton drops every file whose path does not exist.

    python -m benchmarks.gpu.ahead.cache --pack DIR [FILE]    write FILE, or DIR.tar.xz: a tenth of the folder's bytes
    python -m benchmarks.gpu.ahead.cache DIR [FILE]           unpack FILE where DIR is missing, and settle DIR

The second command prepares whatever is to run with TRITON_CACHE_DIR=DIR.
"""

import argparse
import json
import lzma
import os
import sys
import tarfile
import tempfile
from pathlib import Path

#: Prefix of the name of the list of files in each kernel's folder.
GROUP = "__grp__"
#: Files of a cache that its user does not need: code before machine code, and what `tests.kernels.gate` has read.
UNUSED = "*.ttir", "*.ttgir", "*.llir", "*.ptx", "*.source", "code.json"
#: Compression with a window of 128 MiB, two thirds of the bytes that the usual one of 8 MiB gives.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**27}]
#: Maximum bytes of an archive: it is carried to the GPU's machine together with the working tree.
LARGEST = 15 * 2**20


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


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def archive_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.xz")


def pack(folder: Path, archive: Path) -> None:
    """Write a cache without `UNUSED` as an archive. Raises: ValueError if it is too large, or there are no kernels."""
    if not any(folder.glob(f"*/{GROUP}*")):
        raise ValueError(f"{folder} has no compiled kernels; python -m benchmarks.gpu --compile sm_90 --cache fills it")
    partial = archive.with_name(f"{archive.name}.partial")
    paths = [path for path in folder.glob("*/*") if path.is_file() and not any(map(path.match, UNUSED))]
    # Kernels of one name differ little.
    paths.sort(key=lambda path: (path.suffix, path.name, path.stat().st_size))
    with lzma.open(partial, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for path in paths:
            tar.add(path, arcname=path.relative_to(folder))
    if partial.stat().st_size > LARGEST:
        packed = f"{partial.stat().st_size / 2**20:.1f} MiB packed"
        partial.unlink()
        raise ValueError(f"{folder} is {packed}, more than {LARGEST >> 20}; compile one architecture, from empty")
    os.replace(partial, archive)


def unpack(folder: Path, archive: Path) -> None:
    """Unpack an archive, whole or not at all, if the folder is missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial, tarfile.open(archive) as tar:
        tar.extractall(Path(partial, "cache"), filter="data")
        os.replace(Path(partial, "cache"), folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ahead.cache")
    parser.add_argument("--pack", action="store_true", help="write the archive")
    parser.add_argument("folder", type=Path, help="of the cache")
    parser.add_argument("archive", type=Path, nargs="?", help="FOLDER.tar.xz unless given")
    given = parser.parse_args(arguments)
    archive = given.archive or archive_of(given.folder)
    try:
        if given.pack:
            pack(given.folder, archive)
            print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB of {size(given.folder) / 2**20:.1f}")
            return 0
        if not given.folder.exists() and (given.archive or archive.exists()):
            unpack(given.folder, archive)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        print(f"{archive} cannot be {'written' if given.pack else 'unpacked'}: {error}", file=sys.stderr)
        return 2
    print(f"{given.folder}: {settle(given.folder)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
