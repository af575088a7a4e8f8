"""What users hand to a function, looked at before a framework does: what does not fit is told in a sentence."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from html import escape
from typing import Any

# ---- given -----------------------------------------------------------------------------------------------


def instance(where: str, what: str, value: object, kind: type, example: str) -> None:
    """Refuse what is not of a type. Raises: TypeError that names an example."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {what} is a {type(value).__name__}; give a {kind.__name__}, such as {example}")


def shown(value: object) -> str:
    """A value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- recipe text -----------------------------------------------------------------------------------------
# The text of a recipe, or of several over a run, taken apart: names, options, and what stands behind `until`.

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


# ---- spelling --------------------------------------------------------------------------------------------
# Names that are not known, and the nearest one that is.

#: Words that users of other libraries type, and ours.
ALIASES = {"fp8": "tensorwise", "float8": "tensorwise", "fp4": "nvfp4", "swish": "silu"}


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    """Raise a ValueError that names the nearest unless there is one of this kind and name."""
    if name not in known:
        raise ValueError(f"no {kind} {name!r}; {suggest(str(name), known)}")


def suggest(word: str, known: Iterable[str]) -> str:
    """A clause for an error message: the nearest known word, or all of them."""
    names = {name.lower(): name for name in known}
    alias = ALIASES.get(word.lower(), "").lower()
    near = [alias] if alias in names else get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {names[near[0]]!r}?" if near else f"known: {', '.join(names.values())}"


# ---- tables ----------------------------------------------------------------------------------------------
# Tables as a notebook shows them: HTML without a style of its own, every text escaped.


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """One table; cells are escaped as text, numbers aligned to the right.

    Args:
        header: the columns' titles.
        rows: cells in the order of the header, shown by `str`.
        caption: what stands above the table; "" for none.
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Lines of text, each a paragraph."""
    return "".join(f"<p>{escape(line.strip())}</p>" for line in lines)


def _cell(value: object) -> str:
    side = "right" if isinstance(value, int | float) else "left"
    return f'<td style="text-align: {side}">{escape(str(value))}</td>'
