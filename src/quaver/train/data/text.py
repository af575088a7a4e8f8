"""Finding and reading the text to train on, and splitting it by file.

With nothing given, the text is the running Python's own standard library: some 11 MB that are already there.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quaver.train.configuration import memory
from quaver.train.files.lock import HOLDER

# Left out of the default text: what is not the library itself, and tests, which not every distribution ships.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}

# One file in this many is held out for validation.
HELD_OUT = 20


@dataclass(frozen=True)
class Document:
    """One file: its path, for messages, and its bytes: UTF-8, without NUL, at least one."""

    path: Path
    data: bytes


def read(paths: Sequence[str], out: Path | None = None) -> list[Document]:
    """The documents of the given files and folders, or of the standard library if none are given.

    A file that is named must be text; in a folder, empty files, hidden files, files that are not text and the folders
    of runs and comparisons in it are passed over.

    Args:
        out: the folder that this run writes into.
    Raises: ValueError for a missing, empty or non-text file, for a folder without text, and for `out` itself.
    """
    if not paths:
        return library()
    documents: dict[Path, Document] = {}
    for name in paths:
        path = Path(name)
        for document in folder(path, out) if path.is_dir() else [single(path)]:
            documents.setdefault(document.path.resolve(), document)
    return list(documents.values())


def library() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    documents = texts(sorted(files, key=lambda path: path.relative_to(root).as_posix()))
    if not documents:
        raise ValueError(f"this Python keeps no .py files in {root}; name files or folders with --text")
    return documents


def folder(root: Path, out: Path | None) -> list[Document]:
    if out and root.resolve() == out.resolve():
        raise ValueError(f"the text {root} is the folder that this run writes into; give another --out")
    documents = texts(sorted(path for path in walk(root) if path.is_file()))
    if not documents:
        raise ValueError(f"the folder {root} holds no text; name files or folders of text with --text")
    return documents


def walk(root: Path) -> Iterator[Path]:
    """All that a folder and the folders in it hold, but what is hidden and what runs wrote."""
    for parent, folders, names in os.walk(root):
        here = Path(parent)
        if here != root and (here / HOLDER).exists():
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in names if not name.startswith("."))


def single(path: Path) -> Document:
    if not path.exists():
        raise ValueError(f"there is no text file {path}; --text takes files and folders that exist")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe, a device or a socket; --text takes files, which end")
    check_size(path.stat().st_size, f"the text file {path}")
    data = path.read_bytes() if path.stat().st_size else b""
    if not data:
        raise ValueError(f"the text file {path} is empty; --text takes files with text in them")
    if not is_text(data):
        raise ValueError(f"{path} is not text (UTF-8); --text takes text files and folders of them")
    return Document(path, data)


def texts(files: Sequence[Path]) -> list[Document]:
    sizes = [(path, path.stat().st_size) for path in files]  # what a system makes up, such as /proc, is of size 0
    check_size(sum(size for _, size in sizes), "the text")
    documents = (Document(path, path.read_bytes()) for path, size in sizes if size)
    return [document for document in documents if document.data and is_text(document.data)]


def check_size(size: int, what: str) -> None:
    """Raise a ValueError for a text that memory does not hold beside its tokens."""
    if 4 * size > memory.available():
        have = memory.size(memory.available())
        raise ValueError(f"{what} has {memory.size(size)} where there are {have} of memory; give less with --text")


def is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and validation documents: every twentieth file is held out, or the last of fewer.

    Of a single file, the last tenth is held out.
    """
    if len(documents) == 1:
        (only,) = documents
        cut = len(only.data) - len(only.data) // 10
        while cut < len(only.data) and only.data[cut] & 0xC0 == 0x80:  # never inside a character
            cut += 1
        return [Document(only.path, only.data[:cut])], [Document(only.path, only.data[cut:])]
    every = min(len(documents), HELD_OUT)
    held = [index % every == every - 1 for index in range(len(documents))]
    train = [document for document, out in zip(documents, held, strict=True) if not out]
    return train, [document for document, out in zip(documents, held, strict=True) if out]
