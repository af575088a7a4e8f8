"""Writing a small file whole or not at all: a full disk or an interrupt leaves the one that was there."""

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Put `text` in `path` by way of a file beside it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
