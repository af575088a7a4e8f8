"""The text of a recipe, or of several over a run, taken apart: names, options, and what stands behind `until`."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from quaver.core.text.given import shown

#: Characters of a recipe's text; a longer one is a mistake, and Python's parser is not made for any text.
LONGEST = 500
#: The word that says where a part of a run ends, outside of parentheses.
_UNTIL = re.compile(r"(?<!\S)until(?!\S)")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a recipe's text, NAME or NAME(option=value, ...); the values are Python literals.

    Raises: ValueError if the text has another form.
    """
    if len(text) <= LONGEST:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            if isinstance(tree, ast.Name):
                return tree.id, {}
            if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
                options = {option.arg: ast.literal_eval(option.value) for option in tree.keywords if option.arg}
                if len(options) == len(tree.keywords):
                    return tree.func.id, options
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            pass  # MemoryError is how the parser says that something is nested too deeply
    raise ValueError(f"recipe {shown(text)} cannot be read; write NAME or NAME(option=value, ...)")


def pieces(text: str) -> list[str]:
    """What stands between the commas of a text; those inside parentheses belong to a recipe's options."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def end_of(piece: str) -> tuple[str, str | None]:
    """A piece as its recipe and what stands behind its `until`; None without one."""
    options, closing, tail = piece.rpartition(")")
    said = _UNTIL.search(tail)
    if said is None:
        return piece, None
    return (options + closing + tail[: said.start()]).strip(), " ".join(tail[said.end() :].split())


def items(text: str) -> Iterator[str]:
    """The items of a list of recipes, of which one may be a schedule: a part with `until` and what follows are one."""
    item: list[str] = []
    for piece in pieces(text):
        if not piece and not item:
            continue
        recipe, end = end_of(piece)
        item.append(piece if end is None else f"{recipe} until {end}")
        if end is None:
            yield ", ".join(item)
            item = []
    if item:
        yield ", ".join(item)
