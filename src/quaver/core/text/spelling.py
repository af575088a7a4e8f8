"""The nearest valid word for a misspelt one."""

from collections.abc import Iterable
from difflib import get_close_matches


def suggest(word: str, known: Iterable[str]) -> str:
    """A clause for an error message: the nearest known word, or all of them."""
    names = list(known)
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
