"""Argument checks with readable messages, parsing of recipe texts, spelling hints, and HTML tables."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from html import escape
from typing import Any

# ---- argument checks ----


def check_instance(where: str, what: str, value: object, kind: type, example: str) -> None:
    """Raise TypeError with an example if a value is not of the expected type."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {what} is a {type(value).__name__}; give a {kind.__name__}, such as {example}")


def shown(value: object) -> str:
    """Return a shortened repr of a value for a message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- parsing of recipe texts: names, options and `until` ----

#: Maximum length of a recipe's text; longer ones are mistakes, and Python's parser is not safe for arbitrary input.
LONGEST = 500
#: The word before the end of a phase, outside of parentheses.
_UNTIL = re.compile(r"(?<!\S)until(?!\S)")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse NAME or NAME(option=value, ...) to a name and options; the values are Python literals.

    Raises ValueError if the text has another form.
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
            pass  # the parser raises MemoryError for deep nesting
    raise ValueError(f"recipe {shown(text)} cannot be read; write NAME or NAME(option=value, ...)")


def pieces(text: str) -> list[str]:
    """Split a text at commas outside of parentheses."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def end_of(piece: str) -> tuple[str, str | None]:
    """Split a phase into its recipe and the text after `until`, None without one."""
    options, closing, tail = piece.rpartition(")")
    match = _UNTIL.search(tail)
    if match is None:
        return piece, None
    return (options + closing + tail[: match.start()]).strip(), " ".join(tail[match.end() :].split())


def items(text: str) -> Iterator[str]:
    """Split a list of recipes into its items; a schedule with `until` and its following phases is one item."""
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


def folder_name(text: str) -> str:
    """Return a recipe's text as part of a folder name.

    `delayed(history=16)` becomes `delayed-history=16`, and `nvfp4 until 85%, bf16` becomes `nvfp4-until-85pct,bf16`.
    """
    name = re.sub(r"\s+until\s+", "-until-", text.strip())
    for character, replacement in (("(", "-"), ("%", "pct"), ("<", "-below-")):
        name = name.replace(character, replacement)
    return re.sub(r"[^\w=.,+-]", "", name)


# ---- spelling hints for unknown names ----

#: Names used by other libraries, and ours.
ALIASES = {"fp8": "tensorwise", "float8": "tensorwise", "fp4": "nvfp4", "swish": "silu"}


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    """Raise ValueError with the nearest known name if `name` is unknown."""
    if name not in known:
        raise ValueError(f"no {kind} {name!r}; {suggest(str(name), known)}")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a clause for an error message: the nearest known word, or all of them."""
    names = {name.lower(): name for name in known}
    alias = ALIASES.get(word.lower(), "").lower()
    near = [alias] if alias in names else get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {names[near[0]]!r}?" if near else f"known: {', '.join(names.values())}"


# ---- HTML for notebooks, without styling, all text escaped ----


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table; cells are escaped as text, numbers are right-aligned.

    Args:
        header: titles of the columns.
        rows: cells in the order of the header, converted by `str`.
        caption: title above the table; "" for none.
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text as paragraphs."""
    return "".join(f"<p>{escape(line.strip())}</p>" for line in lines)


def _cell(value: object) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<td style="text-align: {side}">{escape(str(value))}</td>'
