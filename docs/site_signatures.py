"""Constructor signatures of the API reference, for classes whose arguments are the fields of a dataclass.

`@takes(Record)` on an `__init__` makes the constructor take the fields of `Record`, `@spreads(Record)` adds them to its
own arguments, and a named tuple or a Flax linen module takes its own fields. A reader of the reference wants these
fields in the signature, but the source only names the record.
"""

from collections.abc import Iterator
from typing import Any

import griffe

OPTIONS = "quaver.options"
#: Bases whose subclasses take their own fields: tuples, and Flax linen modules.
RECORDS = ("NamedTuple", "Module")
KEYWORD_ONLY = griffe.ParameterKind.keyword_only
POSITIONAL = griffe.ParameterKind.positional_or_keyword


class Constructors(griffe.Extension):
    """Replace the parameters of decorated constructors by the fields of their records."""

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any
    ) -> None:
        for cls in list(_classes(pkg)):
            init = cls.members.get("__init__")
            own = init is None and any(
                str(base).rpartition(".")[2] in RECORDS for base in cls.bases
            )
            if own or any(_function(one) == "suggests" for one in cls.decorators):
                _set_parameters(cls, _fields(cls))
            elif isinstance(init, griffe.Function):
                for decorator in init.decorators:
                    record = _record(decorator, loader)
                    if record is not None:
                        _extend(cls, init, record, _function(decorator))


def _classes(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    for member in scope.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            if isinstance(member, griffe.Class):
                yield member
            yield from _classes(member)


def _function(decorator: griffe.Decorator) -> str:
    """Return the name of a decorator of `quaver.options`, "" for any other."""
    module, _, name = decorator.callable_path.rpartition(".")
    return name if module == OPTIONS else ""


def _record(
    decorator: griffe.Decorator, loader: griffe.GriffeLoader
) -> griffe.Class | None:
    """Return the class that a decorator names as its first argument."""
    call = decorator.value
    if _function(decorator) not in ("takes", "spreads") or not isinstance(
        call, griffe.ExprCall
    ):
        return None
    argument = call.arguments[0]
    if not isinstance(argument, griffe.Expr):
        return None
    found: Any = loader.modules_collection[argument.canonical_path]
    found = found.final_target if found.is_alias else found
    return found if isinstance(found, griffe.Class) else None


def _extend(
    cls: griffe.Class, init: griffe.Function, record: griffe.Class, decorator: str
) -> None:
    fields = _fields(record)
    if (
        not fields and "__init__" in record.members
    ):  # an ordinary class: the arguments of its constructor
        fields = [p for p in record["__init__"].parameters if p.kind is KEYWORD_ONLY]
    if decorator == "spreads":
        own = [
            p
            for p in init.parameters
            if p.name != "self" and p.kind is not griffe.ParameterKind.var_keyword
        ]
        names = {p.name for p in own}
        fields = own + [p for p in fields if p.name not in names]
    _set_parameters(cls, fields)


def _set_parameters(cls: griffe.Class, parameters: list[griffe.Parameter]) -> None:
    first = [p for p in parameters if p.kind is not KEYWORD_ONLY]
    last = [p for p in parameters if p.kind is KEYWORD_ONLY]
    this = griffe.Parameter("self", kind=POSITIONAL)
    init = griffe.Function(
        "__init__", parameters=griffe.Parameters(this, *first, *last), parent=cls
    )
    cls.set_member("__init__", init)


def _fields(cls: griffe.Class) -> list[griffe.Parameter]:
    """Return the dataclass fields of a class and its bases in this package, as parameters."""
    fields: dict[str, griffe.Parameter] = {}
    for one in [*reversed(_bases(cls)), cls]:
        keyword_only = any(
            "kw_only=True" in str(decorator.value) for decorator in one.decorators
        )
        for member in one.members.values():
            if not isinstance(member, griffe.Attribute) or member.annotation is None:
                continue
            if str(member.annotation).endswith("KW_ONLY"):
                keyword_only = True
            elif "instance-attribute" in member.labels:
                by_name = keyword_only or "kw_only=True" in str(member.value)
                kind = KEYWORD_ONLY if by_name else POSITIONAL
                parameter = griffe.Parameter(
                    member.name,
                    annotation=member.annotation,
                    kind=kind,
                    default=_default(member),
                )
                fields[member.name] = parameter
    return list(fields.values())


def _bases(cls: griffe.Class) -> list[griffe.Class]:
    try:
        return cls.mro()
    except ValueError:
        return []


def _default(member: griffe.Attribute) -> Any:
    value = member.value
    if isinstance(value, griffe.ExprCall) and value.canonical_path.endswith("field"):
        arguments = {
            a.name: a.value
            for a in value.arguments
            if isinstance(a, griffe.ExprKeyword)
        }
        return arguments.get(
            "default", "..." if "default_factory" in arguments else None
        )
    return value
