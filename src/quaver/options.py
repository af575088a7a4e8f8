"""Constructors with many options: a dataclass defines them, and the constructor accepts its fields.

    @dataclass(frozen=True)
    class MLPOptions(NormOptions):
        dim: int
        bias: bool = True

    class MLP(nn.Module):
        @takes(MLPOptions)
        def __init__(self, options: MLPOptions) -> None: ...

    MLP(768, bias=False)

help(), editors and type checkers show the dataclass's fields as the constructor's arguments, and options that several
layers share are written once, in a base dataclass. For constructors with many arguments of another library, written out
in `def`, `spreads` adds the fields of a record.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from quaver.recipes.text import suggest

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")
C = TypeVar("C", bound=Callable[..., Any])

#: Arguments that Flax adds to every linen module.
FLAX = ("parent", "name")


def takes(record: Callable[P, R]) -> Callable[[Callable[[Any, R], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate an `__init__` that takes one record so that it accepts the record's own arguments.

    The decorated constructor raises TypeError for an unknown argument, suggesting the nearest, and for a missing one.
    """

    def decorate(init: Callable[[Any, R], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def construct(self: Any, /, *args: P.args, **options: P.kwargs) -> None:
            init(self, record(*args, **options))

        return _checked(construct, inspect.signature(record))

    return decorate


def suggests(module: type[M]) -> type[M]:
    """Decorate a class that is its own record, such as a Flax linen module: wrong arguments raise as with `takes`.

    The arguments that Flax appends, `parent` and `name`, must be passed by name, so that a surplus value cannot become
    one.
    """
    construct: Any = module
    last = inspect.Parameter.KEYWORD_ONLY
    accepted = [p.replace(kind=last) if p.name in FLAX else p for p in inspect.signature(module).parameters.values()]
    construct.__init__ = _checked(construct.__init__, inspect.Signature(sorted(accepted, key=lambda p: p.kind)))
    return module


def checks(init: C) -> C:
    """Decorate an `__init__` or another method with explicit arguments: wrong arguments raise as with `takes`."""
    checked: C = _checked(init, inspect.Signature(list(inspect.signature(init).parameters.values())[1:]))
    return checked


def spreads(record: Callable[..., Any], without: Sequence[str] = ()) -> Callable[[C], C]:
    """Decorate an `__init__` that takes `**others`: they are a record's keyword arguments, checked and shown as its
    own.

    Args:
        record: a class or a function; options that the constructor has itself take precedence.
        without: options of the record that the constructor does not accept.
    """

    def decorate(init: C) -> C:
        own = list(inspect.signature(init).parameters.values())[1:]
        left = {p.name for p in own}.union(without)
        others = [p for p in inspect.signature(record).parameters.values() if p.kind is p.KEYWORD_ONLY]
        known = [p for p in own if p.kind is not p.VAR_KEYWORD] + [p for p in others if p.name not in left]
        spread: C = _checked(init, inspect.Signature(known))
        return spread

    return decorate


def shared(record: Callable[..., Any], accepted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that a record accepts too."""
    known = inspect.signature(record).parameters
    return {name: value for name, value in accepted.items() if name in known}


def pick(record: type, source: Any) -> dict[str, Any]:
    """Return the values of a record's fields read from a module or another record, as arguments for a new layer."""
    return {field.name: getattr(source, field.name) for field in fields(record)}


def _checked(init: Any, known: inspect.Signature) -> Any:
    """Wrap a method to check its arguments first, and to show them as its signature and type hints."""

    @wraps(init)
    def checked(self: Any, /, *args: Any, **options: Any) -> Any:
        _check(type(self).__name__, known, args, options)
        return init(self, *args, **options)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    checked.__signature__ = known.replace(parameters=[this, *known.parameters.values()])  # type: ignore[attr-defined]
    option_annotations = {name: option.annotation for name, option in known.parameters.items()}
    checked.__annotations__ = option_annotations | {"return": inspect.signature(init).return_annotation}
    return checked


def _check(where: str, known: inspect.Signature, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in known.parameters:
            raise TypeError(f"{where} has no option {name!r}; {suggest(name, known.parameters)}")
    try:
        known.bind(*args, **options)
    except TypeError as error:
        first = [p.name for p in known.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        others = f"all but {', '.join(first)}" if first else "all"
        raise TypeError(f"{where}: {error}" + f"; give {others} by name" * (len(args) > len(first))) from None
