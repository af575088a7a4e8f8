"""Tables as a notebook shows them: HTML without a style of its own, every text escaped."""

from collections.abc import Iterable, Sequence
from html import escape


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
