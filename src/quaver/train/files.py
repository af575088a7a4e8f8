"""Atomic file writes, and a lock that lets one process at a time write into the folder of a run or comparison.

The lock is the operating system's and ends with its process, so a dead process is no obstacle; readers need no lock. A
file next to it describes the owner, for the error message of a second process. That file remains and marks the folder
as Quaver's.
"""

import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

# ---- whole files ----
# Small files that are read and written as a whole: a full disk or an interrupt leaves the old file intact.
#
# New contents go to a random hidden name first, opened exclusively, so that a planted link is never followed. Only
# regular files are read: a pipe or a device may never end.

#: Maximum bytes of a file of options or of a checkpoint's state.
MAX_BYTES = 64 << 20


def partial_of(path: Path) -> Path:
    """Return a new hidden path in the same folder, for an incomplete or deleted file; see `delete_partial`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path in the folder of `path` to write to; it replaces `path` at the end, or is deleted on failure."""
    check_places(path.parent, [path.name])
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        file.write(text)


def read(path: Path, longest: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises: OSError, or ValueError if it is no regular file, too long or not UTF-8."""
    check_file(path)
    size = path.stat().st_size
    if size > longest:
        raise ValueError(f"{path} has {size} bytes, and quaver never wrote one longer than {longest}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text (UTF-8): {error}") from error


def check_places(folder: Path, names: Iterable[str]) -> None:
    """Raise a ValueError if a folder has the name of a file to be written."""
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            raise ValueError(f"{path} is a folder, not a file; move it away")


def check_file(path: Path) -> None:
    """Raise a ValueError if the path is a folder, a pipe, a device or a socket; a missing file is fine."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe, a device or a socket"
        raise ValueError(f"{path} is {what}, not a file")


def delete_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that no reader sees a part of it."""
    renamed = partial_of(path)
    with suppress(FileNotFoundError):
        os.replace(path, renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def delete_partial(folder: Path) -> None:
    """Delete leftovers of interrupted writes and deletions in a folder."""
    for left in folder.glob(".*.partial"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


# ---- lock ----

LOCK_FILE = ".quaver.lock"
#: Marker file in the folder of a run or comparison.
OWNER_FILE = ".quaver.json"


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Lock a folder against other processes for the duration of the block.

    Args:
        folder: created if missing, and deleted at the end if it is still empty.
        doing: activity for the message that another process gets: "training", "a comparison".
    Raises: ValueError that names the process with the lock, or if the folder disappears.
    """
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    check_own(folder)
    lock = FileLock(folder / LOCK_FILE, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{folder} is in use: {read_lock_owner(folder)}; wait for it, or give another --out"
        ) from error
    try:
        write(folder / OWNER_FILE, lock_owner_text(doing))
        yield
    except FileNotFoundError as error:
        if folder.exists():
            raise
        raise ValueError(f"{folder} was removed or renamed while it was in use; put it back or begin again") from error
    finally:
        if {path.name for path in folder.glob("*")} <= {LOCK_FILE, OWNER_FILE}:
            delete_lock_files(folder, new)
        with suppress(OSError):
            lock.release()


def has_lock_file(folder: Path) -> bool:
    """True if a folder is or was locked by Quaver."""
    return (folder / OWNER_FILE).exists()


def check_own(folder: Path) -> None:
    """Raise a ValueError if something else has the name of one of the lock's files."""
    for path in (folder / LOCK_FILE, folder / OWNER_FILE):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ValueError(f"{path} is not the file that quaver writes there; delete it, or give another --out")


def lock_owner_text(doing: str) -> str:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "doing": doing})


def read_lock_owner(folder: Path) -> str:
    """Describe the process that has locked a folder."""
    try:
        owner = json.loads(read(folder / OWNER_FILE))
        return f"{owner['doing']} by process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process is writing into it"


def delete_lock_files(folder: Path, new: list[Path]) -> None:
    """Delete the lock's files and the folders created for them, if they contain nothing else."""
    for name in (OWNER_FILE, LOCK_FILE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        for path in new:
            path.rmdir()
