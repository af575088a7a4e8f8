"""One process at a time writes into a run's folder, or a comparison's; a reader needs no lock.

The lock is the operating system's and ends with the process that holds it: one that died is no obstacle. Who holds it
is written beside it, for the sentence that the second process prints. That file stays: it marks the folder as quaver's.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from quaver.train.files import whole_file

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
        whole_file.write(folder / HOLDER, described(doing))
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
        said = json.loads(whole_file.read(folder / HOLDER))
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
