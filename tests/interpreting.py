"""Triton's interpreter without what it does over and over, or for nothing."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def spare() -> None:
    """Once for the process: what it does over and over is half of the interpreter's time, and the types of shapes, each
    derived anew for every value, are half of the rest."""
    if interpreter._patch_lang.__module__ == __name__:
        return
    exchange_once()
    interpreter._get_np_dtype = numpys(interpreter._get_np_dtype)
    core._type_for_tuple_values = TypeOfTuple
    core.tuple.__eq__ = equal(core.tuple.__eq__)
    core.block_type.__init__ = begin_block(core.block_type.__init__)
    core.tensor.__init__ = begin_tensor


def exchange_once() -> None:
    """It exchanges the functions of `triton.language` for its own at each launch, and searches them all again in each
    call of a function inside a kernel, where those are its own already. And beside each sum and product of integers it
    computes, in 64 bits, whether that overflows, which an assertion looks at that only debugging switches on.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    exchange = interpreter._patch_lang

    def once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return exchange(fn)

    interpreter._patch_lang = once


def numpys(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's type of a type, whose table is built anew at each of Triton's calls."""
    kept: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, core.block_type) else of
        if isinstance(scalar, core.pointer_type):
            return own(scalar)
        if scalar.name not in kept:
            kept[scalar.name] = own(scalar)
        return kept[scalar.name]

    return numpy_type


class TypeOfTuple(core.tuple_type):  # type: ignore[misc]
    """A tuple's type, computed where it is read: of most tuples, which are shapes, it never is."""

    def __init__(self, values: Any, fields: Any = None) -> None:
        self.of = values, fields

    @cached_property
    def _own(self) -> Any:
        return TYPE_OF_TUPLE(*self.of)

    types = property(lambda self: self._own.types)
    fields = property(lambda self: self._own.fields)
    name = property(lambda self: self._own.name)


TYPE_OF_TUPLE = core._type_for_tuple_values


class Shape:
    """What a block's type, and a tensor of it, derive from a shape."""

    def __init__(self, shape: Any, numel: int) -> None:
        self.shape, self.numel, self.text = shape, numel, str(shape)
        self.of_tensor = core.tuple([core.constexpr(number) for number in shape])
        self.product = core.constexpr(numel)


SHAPES: dict[tuple[int, ...], Shape] = {}
#: Of a tensor without a shape.
POINT = core.tuple([]), core.constexpr(1)


def begin_block(own: Callable[..., None]) -> Callable[..., None]:
    """A block's type from the first one of its shape, which Triton has checked."""

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is core.tuple else shape
        known = SHAPES.get(tuple(values)) if plain(values) else None
        if known is None:
            own(self, element_ty, shape)
            known = SHAPES.setdefault(tuple(self.shape.values), Shape(self.shape, self.numel))
        self.known, self.element_ty, self.shape, self.numel = known, element_ty, known.shape, known.numel
        self.name = f"<{known.text}, {element_ty}>"

    return begin


def begin_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.known.of_tensor, type.known.product) if type.is_block() else POINT


def plain(values: Any) -> bool:
    """Whether these are numbers that no constexpr surrounds."""
    return type(values) is list and all(type(value) is int for value in values)


def equal(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Whether two shapes are the same, without making a tuple of either."""

    def compare(self: Any, other: Any) -> Any:
        values = other.values if type(other) is core.tuple else other
        return core.constexpr(self.values == values) if plain(values) else own(self, other)

    return compare
