"""Names that are not known, and the nearest one that is."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

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
