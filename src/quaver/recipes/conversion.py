"""Rules by which `convert` selects the recipe of each layer, and its report."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

from quaver.recipes.spec import Recipe
from quaver.recipes.text import html_lines, html_table, suggest

# ---- rules: patterns on names and sizes; the first match wins ----
# Reporting unused rules is an idea of google/qwix `qconfig.py`.


class SkipFilter(Protocol):
    """Function of a layer's name, sizes and recipe that decides if `convert` skips the layer.

    One that also takes `experts` gets by that name the number of weights that a layer stacks, 0 for other layers.
    """

    def __call__(self, name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
        """Return the reason to skip this layer, or "" to convert it."""


#: Type of the argument `skip` of `convert`: name patterns and filters, or one filter.
Skip = Iterable[str | SkipFilter] | SkipFilter


def matches(pattern: str, name: str) -> bool:
    """Return True if an fnmatch pattern matches the full name, or any suffix of it that starts after a dot."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


def uses_of(name: str, uses: int | Mapping[str, int]) -> int:
    """Return the number of calls of a layer in one step; of a dict the first pattern that matches its name decides."""
    if isinstance(uses, int):
        return uses
    return next((n for pattern, n in uses.items() if matches(pattern, name)), 1)


def names_a_module(pattern: str) -> bool:
    """Return True if the last part of a pattern is specific, unlike that of "*" or "layers.*"."""
    return pattern.rpartition(".")[2].strip("*?") != ""


@dataclass(frozen=True, kw_only=True)
class ModuleRule:
    """One line of `Rules`: a name pattern, and optionally sizes, that a module must match."""

    #: fnmatch pattern for the module's name.
    pattern: str = "*"
    #: Recipe, its name, or None to leave the module untouched.
    recipe: Recipe | str | None
    #: Smallest feature sizes that match.
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
        defaults = {"min_in_features": 0, "min_out_features": 0, "multiple_of": 1}
        sizes = [
            f"{size}={getattr(self, size)}" for size, default in defaults.items() if getattr(self, size) != default
        ]
        return self.pattern + (f" ({', '.join(sizes)})" if sizes else "")


class Rules:
    """An ordered list of rules.

    Args:
        rules: {pattern: recipe, name or None}, or an iterable of `ModuleRule` for patterns with sizes.
    """

    def __init__(self, rules: Mapping[str, Recipe | str | None] | Iterable[ModuleRule]) -> None:
        if isinstance(rules, str | Recipe):
            raise ValueError(f"Rules takes a dict of patterns, such as Rules({{'*': {str(rules)!r}}}), not {rules!r}")
        if isinstance(rules, Mapping):
            rules = [ModuleRule(pattern=pattern, recipe=recipe) for pattern, recipe in rules.items()]
        self.rules = tuple(rules)
        for rule in self.rules:
            if not isinstance(rule, ModuleRule):
                raise ValueError(f"Rules takes a dict of patterns or an iterable of Rule, and got {rule!r}")
        if not self.rules:
            raise ValueError("these rules are empty; give at least one, such as Rules({'*': 'mxfp8'})")

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'{str(rule)!r}: {rule.recipe}' for rule in self.rules)})"

    def match(self, name: str, in_features: int, out_features: int) -> ModuleRule | None:
        """Return the first rule that matches, or None."""
        return next((r for r in self.rules if r.fits(name, in_features, out_features)), None)


# ---- output heads, which stay in high precision unless requested ----
#
# Published recipes leave them unquantized. Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3.1), NVIDIA's NVFP4
# pre-training (arXiv:2509.25149).

#: Last parts of names that identify an output head, if its output features equal the vocabulary size.
HEAD_NAMES = {
    "lm_head",
    "head",
    "output",
    "output_layer",
    "output_projection",
    "embed_out",
    "unembed",
    "to_logits",
    "logits",
    "logits_dense",
}

HEAD_REASON = "the output head stays in high precision; convert(..., head=True) or a rule that names it converts it"


def reason_head(name: str, rule: ModuleRule | None) -> str:
    """Return why a layer with an output head's name stays in high precision, or "" for another layer.

    A rule that names the layer, unlike "*", converts it.
    """
    is_head = name.rpartition(".")[2] in HEAD_NAMES
    return HEAD_REASON if is_head and (rule is None or not names_a_module(rule.pattern)) else ""


# ---- conversion ----


@dataclass
class ConversionReport:
    """Result of `convert`: converted layers, and reasons for the skipped ones."""

    #: Recipe of each converted layer, by name.
    converted: dict[str, Recipe] = field(default_factory=dict)
    #: Reason for each skipped linear layer, by name.
    skipped: dict[str, str] = field(default_factory=dict)
    #: Patterns of rules and skip that matched nothing, or only layers taken by an earlier one.
    unused: list[str] = field(default_factory=list)
    #: Number of modules of other classes with a matrix of their own, such as embeddings and transformers' Conv1D.
    others: dict[str, int] = field(default_factory=dict)
    #: Class that the front end converts.
    kind: str = "nn.Linear"
    #: Recipe of each attention with quantized GEMMs, by name.
    attention: dict[str, Recipe] = field(default_factory=dict)
    #: Number of attention modules, by class, that a recipe would quantize but `convert` cannot reach.
    other_attention: dict[str, int] = field(default_factory=dict)
    #: Parameters read by GEMMs that were converted, skipped by the caller's choice (skip, rules), and not reached.
    #: Counted by the torch front end.
    converted_parameters: int = 0
    chosen_parameters: int = 0
    unreached_parameters: int = 0
    #: Parameters of output heads, which stay in high precision unless requested.
    head_parameters: int = 0

    @property
    def share(self) -> float:
        """Converted share of the parameters that GEMMs read, not counting an unrequested head; 0 without any."""
        return self.converted_parameters / max(1, self._gemm_parameters)

    @property
    def reaches_little(self) -> bool:
        """True if `convert` did not reach most of the parameters that the caller did not choose to skip."""
        return self.unreached_parameters > self.converted_parameters

    @property
    def _gemm_parameters(self) -> int:
        return self.converted_parameters + self.chosen_parameters + self.unreached_parameters

    def __str__(self) -> str:
        skipped = [f"  left alone: {name or '(root)'} ({why})" for name, why in self.skipped.items()]
        return "\n".join([*self._done(), *skipped, *self._rest()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        layers = {name or "(root)": recipe for name, recipe in self.converted.items()}
        skipped = {name or "(root)": why for name, why in self.skipped.items()}
        html = html_lines(self._done())
        if layers:
            html += f"<details><summary>layers</summary>{html_table(('layer', 'recipe'), layers.items())}</details>"
        if skipped:
            html += html_table(("left alone", "why"), skipped.items())
        return html + html_lines(self._rest())

    def _done(self) -> list[str]:
        """Lines about quantized layers."""
        lines = [f"converted {_counts(self.converted)}"]
        if self._gemm_parameters:
            left = f"{self.chosen_parameters:,} left alone by choice, {self.unreached_parameters:,} not reached"
            if self.head_parameters:
                left += f"; beside them {self.head_parameters:,} of the output head"
            lines.append(f"  of {self._gemm_parameters:,} parameters that GEMMs read {self.share:.0%}; {left}")
        if self.attention:
            lines.append(f"  attention quantized: {_counts(self.attention)}")
        if self.other_attention:
            kinds = ", ".join(f"{n} {kind}" for kind, n in self.other_attention.items())
            lines.append(f"  attention stays in high precision, because it is not a DotProductAttention: {kinds}")
        return lines

    def _rest(self) -> list[str]:
        """Lines about modules that no rule could reach, and about unused rules."""
        lines = []
        if self.others:
            lines.append(f"  not {self.kind}: " + ", ".join(f"{n} {kind}" for kind, n in self.others.items()))
        return lines + [f"  matched nothing: {pattern}{self._nearest(pattern)}" for pattern in self.unused]

    def _nearest(self, pattern: str) -> str:
        """Return a hint for a misspelt pattern: the nearest part of a layer's name."""
        word = pattern.partition(" (")[0].rpartition(".")[2]
        hint = suggest(word, {part: None for name in (*self.converted, *self.skipped) for part in name.split(".")})
        return f"; {hint}" if hint.startswith("did you mean") and repr(word) not in hint else ""


def _counts(recipes: Mapping[str, Recipe]) -> str:
    by_recipe = Counter(str(recipe) for recipe in recipes.values())
    return ", ".join(f"{n} to {name}" for name, n in by_recipe.items()) or "nothing"


def _check_signature(entry: Callable[..., Any]) -> None:
    """Raise ValueError if a filter does not accept the arguments that `convert` passes, as those of torchao."""
    try:
        signature = inspect.signature(entry)
    except (TypeError, ValueError):
        return  # no signature available
    try:
        signature.bind("name", 1, 1, None)
    except TypeError as error:
        raise ValueError(
            f"the skip filter {entry!r} takes {signature}; it is called with (name, in_features, out_features, "
            'recipe), and must return the reason to skip the layer, or "" to convert it. torchao\'s filters, of '
            "(module, fqn), have the opposite sense: they return True for layers to convert"
        ) from error


def _parameters(entry: Callable[..., Any]) -> Iterable[str]:
    """Return the names of a filter's parameters; none without a signature."""
    try:
        return inspect.signature(entry).parameters
    except (TypeError, ValueError):
        return ()


class ConversionRules:
    """Rules and skip patterns, with a record of which were used.

    Args:
        recipe: a recipe or its name for all layers, or `Rules`, or the dict that `Rules` takes.
        skip: name patterns to skip, and filters (`quaver.recipes.conversion.SkipFilter`).

    Raises:
        ValueError: skip is a string, or contains something other than patterns and filters of these four arguments.
    """

    def __init__(self, recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None], skip: Skip) -> None:
        if isinstance(skip, str):
            raise ValueError(f"skip is the string {skip!r}; give a list of patterns: skip=[{skip!r}]")
        entries = [skip] if callable(skip) else list(skip)
        if not isinstance(recipe, Rules):
            recipe = Rules(recipe if isinstance(recipe, Mapping) else {"*": recipe})
        self.rules = recipe
        self.skip: list[str] = []
        self.filters: list[SkipFilter] = []
        for entry in entries:
            if isinstance(entry, str):
                self.skip.append(entry)
            elif callable(entry) and not isinstance(entry, type):
                _check_signature(entry)
                self.filters.append(entry)
            else:
                raise ValueError(
                    f"skip holds {entry!r}; give patterns of names such as 'lm_head', and filters such as "
                    "quaver.rules.unprofitable('h100')"
                )
        self._used: set[str | ModuleRule] = set()

    def decide(self, names: Sequence[str], in_features: int, out_features: int) -> tuple[ModuleRule | None, str]:
        """Return (first rule that matches any of a layer's names, ""), or (rule or None, reason to skip the layer)."""
        skipped = self.skips(names)
        if skipped:
            return None, skipped
        fitting = [rule for n in names if (rule := self.rules.match(n, in_features, out_features)) is not None]
        if not fitting:
            return None, "no rule matches it"
        rule = min(fitting, key=self.rules.rules.index)
        self._used.add(rule)
        return rule, f"rule {str(rule)!r} leaves it untouched" if rule.recipe is None else ""

    def skips(self, names: Sequence[str]) -> str:
        """Return a text with the pattern that skips any of these names, or ""."""
        for pattern in self.skip:
            if any(matches(pattern, name) for name in names):
                self._used.add(pattern)
                return f"skip pattern {pattern!r}"
        return ""

    def leaves(self, name: str, in_features: int, out_features: int) -> bool:
        """Return True if rules or patterns skip a module; does not count as a use of the rule."""
        rule = self.rules.match(name, in_features, out_features)
        return any(matches(pattern, name) for pattern in self.skip) or rule is None or rule.recipe is None

    def refused(self, name: str, in_features: int, out_features: int, recipe: Recipe, experts: int = 0) -> str:
        """Return a filter's reason to skip a linear layer that would get this recipe, or ""."""
        for skips in self.filters:
            own = {"experts": experts} if experts and "experts" in _parameters(skips) else {}
            why = skips(name, in_features, out_features, recipe, **own)
            if not isinstance(why, str):
                raise ValueError(
                    f"the skip filter {skips!r} returned {why!r} for {name!r}; it must return the reason to skip the "
                    'layer, or "" to convert it'
                )
            if why:
                return why
        return ""

    @property
    def unused(self) -> list[str]:
        """Patterns and rules that decided nothing."""
        return [str(p) for p in (*self.skip, *self.rules.rules) if p not in self._used]

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of rules and skip that match none of these names."""
        patterns = {p for p in self.skip if p not in self._used}
        patterns |= {rule.pattern for rule in self.rules.rules if rule not in self._used}
        names = list(names) if patterns else []
        return sorted(pattern for pattern in patterns if not any(matches(pattern, name) for name in names))
