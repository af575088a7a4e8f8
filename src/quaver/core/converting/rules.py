"""Which module gets which recipe: patterns on names and sizes, the first match wins.

Sources for the idea that unused rules are reported: google/qwix `qconfig.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from quaver.core.spec import Recipe


class SkipFilter(Protocol):
    """Decides by a layer's name, sizes and recipe whether `convert` leaves it alone."""

    def __call__(self, name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
        """Why this layer shall not get this recipe, or ""."""


#: What `convert` takes as skip: patterns of names and filters, or one filter.
Skip = Iterable[str | SkipFilter] | SkipFilter


def matches(pattern: str, name: str) -> bool:
    """True if an fnmatch pattern fits the full name, or any suffix of it that starts after a dot."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


def names_a_module(pattern: str) -> bool:
    """True if the last part of a pattern says more than that there is one, as that of "*" and "layers.*" does not."""
    return pattern.rpartition(".")[2].strip("*?") != ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of `Rules`: a name, and optionally sizes, that a module must have."""

    #: fnmatch pattern on the module's name.
    pattern: str = "*"
    #: Recipe, its name, or None to leave the module untouched.
    recipe: Recipe | str | None
    #: The smallest feature sizes that match.
    min_in_features: int = 0
    min_out_features: int = 0
    #: Both feature sizes must be multiples of this.
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ValueError(f"a rule's pattern is a module name such as '*.k_proj', not {self.pattern!r}")
        for size, least in (("min_in_features", 0), ("min_out_features", 0), ("multiple_of", 1)):
            value = getattr(self, size)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{size} of the rule {self.pattern!r} is {value!r}; give a whole number, {least} or more"
                )

    def fits(self, name: str, in_features: int, out_features: int) -> bool:
        return (
            matches(self.pattern, name)
            and in_features >= self.min_in_features
            and out_features >= self.min_out_features
            and in_features % self.multiple_of == 0
            and out_features % self.multiple_of == 0
        )

    def __str__(self) -> str:
        asked = {"min_in_features": 0, "min_out_features": 0, "multiple_of": 1}
        sizes = [f"{size}={getattr(self, size)}" for size, default in asked.items() if getattr(self, size) != default]
        return self.pattern + (f" ({', '.join(sizes)})" if sizes else "")


class Rules:
    """An ordered list of rules.

    Args:
        rules: {pattern: recipe, name or None}, or an iterable of `Rule` for patterns with sizes.
    """

    def __init__(self, rules: Mapping[str, Recipe | str | None] | Iterable[Rule]) -> None:
        if isinstance(rules, str | Recipe):
            raise ValueError(f"Rules takes a dict of patterns, such as Rules({{'*': {str(rules)!r}}}), not {rules!r}")
        if isinstance(rules, Mapping):
            rules = [Rule(pattern=pattern, recipe=recipe) for pattern, recipe in rules.items()]
        self.rules = tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"Rules takes a dict of patterns or an iterable of Rule, and got {rule!r}")
        if not self.rules:
            raise ValueError("these rules are empty; give at least one, such as Rules({'*': 'mxfp8'})")

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'{str(rule)!r}: {rule.recipe}' for rule in self.rules)})"

    def match(self, name: str, in_features: int, out_features: int) -> Rule | None:
        """The first rule that fits, or None."""
        return next((r for r in self.rules if r.fits(name, in_features, out_features)), None)
