"""The decorator that every recipe function wears: options are checked, and equal recipes are one object."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from quaver.core.spec import AttentionSpec, QuantSpec, Recipe, ScaleKind
from quaver.core.text.spelling import suggest

P = ParamSpec("P")

#: By text. torch.compile guards on identity: an equal but distinct recipe would compile again. Of a dictionary with
#: texts as keys it guards the one that is looked up; with recipes as keys it would guard all, and each new recipe would
#: compile again whatever builds one.
_interned: dict[str, Recipe] = {}
#: Options of these classes are told apart by their repr.
PLAIN = frozenset((bool, int, float, str))


def intern(recipe: Recipe) -> Recipe:
    """The first recipe seen that equals this one."""
    first = _interned.get(recipe.text)
    if first is None:
        first = _interned[recipe.text] = recipe
    return first


def recipe(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Turn an unknown option into a sentence with the nearest one, and intern what is built."""
    known = list(inspect.signature(function).parameters)
    built: dict[str, Recipe] = {}

    @wraps(function)
    def build(*args: P.args, **options: P.kwargs) -> Recipe:
        for option in options:
            if option not in known:
                hint = suggest(option, known) if known else "it takes no options"
                raise ValueError(f"recipe {function.__name__!r} has no option {option!r}; {hint}")
        if args:
            raise ValueError(f"give the options of recipe {function.__name__!r} by name: {', '.join(known)}")
        if not all(type(value) in PLAIN for value in options.values()):
            return intern(function(*args, **options))
        # A compiler looks up what is there; how a recipe is built and checked it would follow for a second.
        given = ", ".join([f"{option}={value!r}" for option, value in options.items()])
        if given not in built:
            built[given] = intern(function(*args, **options))
        return built[given]

    return build


def flags(**values: object) -> None:
    """Refuse what is not True or False, such as the string "false" from a command line."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give True or False")


def float32_scale(power_of_two: bool) -> ScaleKind:
    """The kind of a scale that is stored as a float32, by a recipe's option."""
    flags(power_of_two=power_of_two)
    return "power_of_two" if power_of_two else "fp32"


def attention_spec(wanted: bool, input: QuantSpec | None, grad_output: QuantSpec | None) -> AttentionSpec | None:
    """Attention quantized as a recipe's GEMMs quantize their input and grad_output, if it is wanted."""
    flags(attention=wanted)
    if not wanted:
        return None
    assert input is not None and grad_output is not None
    return AttentionSpec(input, grad_output)
