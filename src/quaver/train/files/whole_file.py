"""Small files read and written whole or not at all: a full disk or an interrupt leaves the one that was there.

What is written lies first under a random hidden name, opened so that nothing may lie there already:
a link that was planted is never written through. What is read must be a file: a pipe or a device may never end.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
