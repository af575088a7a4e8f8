"""One process at a time writes into a run's folder, or a comparison's; a reader needs no lock.

The lock is the operating system's and ends with the process that holds it: one that died is no obstacle. Who holds it
is written beside it, for the sentence that the second process prints. That file stays: it marks the folder as quaver's.
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

# ---- whole file ------------------------------------------------------------------------------------------
# Small files read and written whole or not at all: a full disk or an interrupt leaves the one that was there.
#
# What is written lies first under a random hidden name, opened so that nothing may lie there already:
# a link that was planted is never written through. What is read must be a file: a pipe or a device may never end.

#: Bytes that a file of options, or of what a checkpoint says about itself, has at most.
LONGEST = 64 << 20


def partial_of(path: Path) -> Path:
    """A new hidden name beside `path`, for what is not whole yet or goes; `clear` takes away what is left of it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new path beside `path` to write to: it takes its place when all is written, and goes if that fails."""
    check_places(path.parent, [path.name])
    partial = partial_of(path)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write(path: Path, text: str) -> None:
    """Put `text` in `path` by way of a file beside it."""
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        file.write(text)


def read(path: Path, longest: int = LONGEST) -> str:
    """The text of a file. Raises: OSError, or a ValueError that names it where it is no file, too long or no UTF-8."""
    check_file(path)
    size = path.stat().st_size
    if size > longest:
        raise ValueError(f"{path} has {size} bytes, and quaver never wrote one longer than {longest}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text (UTF-8): {error}") from error


def check_places(folder: Path, names: Iterable[str]) -> None:
    """Raise a ValueError for a folder in the place of a file that is to be written."""
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():
            raise ValueError(f"{path} is a folder, not a file; move it away")


def check_file(path: Path) -> None:
    """Raise a ValueError for a folder, a pipe, a device or a socket; nothing where nothing is."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe, a device or a socket"
        raise ValueError(f"{path} is {what}, not a file")


def put_away(path: Path) -> None:
    """Delete a folder: its name goes first, so that no reader sees half of it."""
    gone = partial_of(path)
    with suppress(FileNotFoundError):
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def clear(folder: Path) -> None:
    """Take away what an interrupted write or deletion left in a folder."""
    for left in folder.glob(".*.partial"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


# ---- lock ------------------------------------------------------------------------------------------------

LOCK = ".quaver.lock"
#: Marks a folder of a run or a comparison.
HOLDER = ".quaver.json"


@contextmanager
def held(folder: Path, doing: str) -> Iterator[None]:
    """While entered, no other process enters it for this folder.

    Args:
        folder: made if it is not there; if it is still empty at the end it goes again.
        doing: what is done in it, for the message that another process gets: "training", "a comparison".
    Raises: ValueError that names the process that is in it, or if the folder goes meanwhile.
    """
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    check_own(folder)
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"{folder} is in use: {holder(folder)}; wait for it, or give another --out") from error
    try:
        write(folder / HOLDER, described(doing))
        yield
    except FileNotFoundError as error:
        if folder.exists():
            raise
        raise ValueError(f"{folder} was removed or renamed while it was in use; put it back or begin again") from error
    finally:
        if {path.name for path in folder.glob("*")} <= {LOCK, HOLDER}:
            forget(folder, new)
        with suppress(OSError):
            lock.release()


def marked(folder: Path) -> bool:
    """Whether a folder is, or was, held."""
    return (folder / HOLDER).exists()


def check_own(folder: Path) -> None:
    """Raise a ValueError if something that quaver does not make bears the name of one of the lock's files."""
    for path in (folder / LOCK, folder / HOLDER):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ValueError(f"{path} is not the file that quaver writes there; delete it, or give another --out")


def described(doing: str) -> str:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "doing": doing})


def holder(folder: Path) -> str:
    """Who holds a folder's lock, in words."""
    try:
        said = json.loads(read(folder / HOLDER))
        return f"{said['doing']} by process {said['pid']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process is writing into it"


def forget(folder: Path, new: list[Path]) -> None:
    """Take away the lock's files and the folders that were made for them, if nothing else came in."""
    for name in (HOLDER, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        for path in new:
            path.rmdir()
