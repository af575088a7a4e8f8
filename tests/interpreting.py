"""Speed up Triton's interpreter by removing repeated and useless work."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def spare() -> None:
    """Once for the process: what it does over and over is most of the interpreter's time, and the types of shapes, each
    derived anew for every value, are half of the rest."""
    if interpreter._patch_lang.__module__ == __name__:
        return
    exchange_once()
    interpreter._patch_attr = exchange_plainly
    interpreter._get_np_dtype = numpys(interpreter._get_np_dtype)
    interpreter._validate_np_data_size = fits(interpreter._validate_np_data_size)
    interpreter.TensorHandle.__init__ = begin_handle
    interpreter.InterpreterBuilder.binary_op = operate
    core._type_for_tuple_values = TypeOfTuple
    core._unwrap_if_constexpr = unwrap(core._unwrap_if_constexpr)
    core.tuple.__eq__ = equal(core.tuple.__eq__)
    core.block_type.__new__ = block_of  # type: ignore[assignment]
    core.block_type.__init__ = begin_block(core.block_type.__init__)
    core.block_type.with_element_ty = lambda self, scalar: core.block_type(scalar, self.sizes)
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = begin_tensor
    core.dtype.serial = core.dtype.known = None
    for number, one in enumerate(one for one in vars(core).values() if type(one) is core.dtype):
        one.serial = number
    core.dtype.__eq__ = same(core.dtype.__eq__)  # type: ignore[method-assign]
    core.dtype.is_int = lambda self: self.name in INTEGERS
    TritonSemantic.binary_op_type_checking_impl = checked(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.cast = cast(TritonSemantic.cast)


INTEGERS = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
#: Types without a constexpr around or inside.
BARE = frozenset([core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)])


def exchange_once() -> None:
    """Patch `triton.language` only once for each kernel.

    The interpreter patches it at each launch, after a search of all modules, and again in each call of a function in
    a kernel, where it is patched already. It also computes in 64 bits whether a sum or product of integers overflows,
    for an assertion that only debugging enables.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    exchange = interpreter._patch_lang
    #: By kernel its modules of the language, and by these modules and the patch of tensors the patched attributes.
    modules: dict[Any, tuple[Any, ...]] = {}
    exchanged: dict[Any, list[tuple[Any, str, Any]]] = {}

    def once(fn: Any) -> Any:
        if fn not in modules:
            modules[fn] = tuple(value for value in fn.__globals__.values() if value is tl or value is core)
        of = modules[fn]
        if of and not any(core.is_builtin(module.load) for module in of):
            return interpreter._LangPatchScope()
        key = of, interpreter._patch_lang_tensor
        if key not in exchanged:
            scope = exchange(fn)
            exchanged[key] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for place, name, value in exchanged[key]:
            scope.set_attr(place, name, value)
        return scope

    interpreter._patch_lang = once


def exchange_plainly(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Bind a function of the language to its interpreter once, without a repeated check."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(place, name, call)


def unwrap(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in BARE:
            return value
        return value.value if kind is core.constexpr else own(value)

    return unwrapped


def checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands brought to one type and shape. Of two types it is known what they become, and of a type and a number
    which constant that is; an address and a whole number keep their types."""
    become: dict[Any, tuple[Any, Any]] = {}
    constants: dict[Any, Any] = {}

    def check(self: Any, lhs: Any, rhs: Any, *flags: Any) -> Any:
        left, right = type(lhs) is core.tensor, type(rhs) is core.tensor
        if left and type(lhs.dtype) is core.pointer_type and flags[:1] == (True,):
            if type(rhs) is int:
                rhs = self.to_tensor(rhs)
            if type(rhs) is core.tensor and rhs.dtype.name in INTEGERS:
                return self.broadcast_impl_value(lhs, rhs)
        if left and right:
            key = lhs.type.serial, rhs.type.serial, flags
            types = become.get(key)
            if types is not None:
                lhs, rhs = self.cast(lhs, types[0]), self.cast(rhs, types[1])
                return (lhs, rhs) if lhs.type.known is rhs.type.known else self.broadcast_impl_value(lhs, rhs)
            both = own(self, lhs, rhs, *flags)
            if None not in key:
                become[key] = both[0].dtype, both[1].dtype
            return both
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        # NaN is no key, and zeros of both signs are one.
        if (
            not (left or right)
            or tensor.type.serial is None
            or number != number
            or (type(number) is float and not number)
        ):
            return own(self, lhs, rhs, *flags)
        key = tensor.type.serial, number, type(number), left, flags
        constant = constants.get(key)
        if constant is not None:
            return (tensor, constant) if left else (constant, tensor)
        lhs, rhs = own(self, lhs, rhs, *flags)
        if tensor is (lhs if left else rhs):
            constants[key] = one_number(rhs if left else lhs)
        return lhs, rhs

    return check


def one_number(constant: Any) -> Any:
    """As large as a number in memory."""
    data = constant.handle.data
    constant.handle.data = np.broadcast_to(data.reshape(-1)[0].copy(), data.shape)
    return constant


def broadcast(own: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands brought to one shape, as numpy does it."""
    shapes: dict[Any, Any] = {}

    def fitting(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.known is b.known:
            return lhs, rhs
        if not a.is_block():
            return spread(lhs, b.sizes), rhs
        if not b.is_block():
            return lhs, spread(rhs, a.sizes)
        key = a.known, b.known
        if key not in shapes:
            both = own(self, lhs, rhs)
            shapes[key] = both[0].type.sizes if len(a.sizes) == len(b.sizes) else None
            return both
        if shapes[key] is None:
            return own(self, lhs, rhs)
        return tuple(broadcast_to(one, shapes[key]) for one in (lhs, rhs))

    return fitting


def spread(scalar: Any, sizes: list[int]) -> Any:
    """A block of one number, as large as that in memory."""
    data = np.asarray(scalar.handle.data)
    block = np.ndarray(sizes, data.dtype, data, 0, (0,) * len(sizes))
    return core.tensor(interpreter.TensorHandle(block, scalar.dtype), core.block_type(scalar.dtype, sizes))


def broadcast_to(tensor: Any, sizes: list[int]) -> Any:
    if tensor.type.sizes == sizes:
        return tensor
    data = np.broadcast_to(tensor.handle.data, sizes)
    return core.tensor(interpreter.TensorHandle(data, tensor.dtype), core.block_type(tensor.dtype, sizes))


def same(own: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or own(self, other)


def cast(own: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, value: Any, dtype: Any, *rest: Any) -> Any:
        source = value.dtype
        if source is dtype:
            return value
        target = dtype.scalar
        # What numpy converts as Triton does: bf16 and FP8 are bits to it, and of a truth value a bit is wanted.
        if source.name in CONVERTED and target.name in CONVERTED and source is not target and rest in ((), (None,)):
            data = value.handle.data.astype(interpreter._get_np_dtype(target))
            kind = core.block_type(target, value.type.sizes) if value.type.is_block() else target
            return core.tensor(interpreter.TensorHandle(data, target), kind)
        return own(self, value, dtype, *rest)

    return to


#: Types between which Triton's interpreter converts by `astype` alone, but for those from one float to another.
CONVERTED = INTEGERS - {"int1"}


def operate(self: Any, lhs: Any, rhs: Any, function: Any) -> Any:
    """The result of a binary operation, converted to the narrower dtype where numpy has widened it."""
    output, dtype = function(lhs.data, rhs.data), lhs.dtype
    if type(dtype) is not core.dtype:
        dtype = dtype.scalar
    if output.itemsize > (dtype.itemsize or 1):
        output = output.astype(interpreter._get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def numpys(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache numpy's types of Triton's types, whose table Triton builds again at each call."""
    types: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, core.block_type) else of
        if isinstance(scalar, core.pointer_type):
            return own(scalar)
        if scalar.name not in types:
            types[scalar.name] = own(scalar)
        return types[scalar.name]

    return numpy_type


def fits(own: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def fit(data: Any, of: Any) -> bool:
        return data.itemsize <= (of.itemsize or 1) if type(of) is core.dtype else own(data, of)

    return fit


def begin_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not core.dtype or data.itemsize > (dtype.itemsize or 1):
        self.__post_init__()


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
        self.dimensions = core.tuple([core.constexpr(number) for number in shape])
        self.product = core.constexpr(numel)


SHAPES: dict[tuple[int, ...], Shape] = {}
#: Blocks of numbers, one of each type and shape.
BLOCKS: dict[Any, Any] = {}
SERIALS = itertools.count(1000)
#: Of a tensor without a shape.
POINT = core.tuple([]), core.constexpr(1)


def block_of(cls: Any, element_ty: Any, shape: Any) -> Any:
    """The block's type that there is, or a new one."""
    values = shape.values if type(shape) is core.tuple else shape
    if type(element_ty) is not core.dtype or type(values) is not list:
        return object.__new__(cls)
    try:
        return BLOCKS[element_ty.name, *values]
    except (KeyError, TypeError):
        return object.__new__(cls)


def begin_block(own: Callable[..., None]) -> Callable[..., None]:
    """A block's type from the first one of its shape, which Triton has checked."""

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        if self.serial is not None:
            return
        values = shape.values if type(shape) is core.tuple else shape
        known = SHAPES.get(tuple(values)) if plain(values) else None
        if known is None:
            own(self, element_ty, shape)
            known = SHAPES.setdefault(tuple(self.shape.values), Shape(self.shape, self.numel))
        self.known, self.element_ty, self.shape, self.numel = known, element_ty, known.shape, known.numel
        self.name, self.sizes = f"<{known.text}, {element_ty}>", list(known.shape.values)
        if type(element_ty) is core.dtype:
            self.serial = BLOCKS.setdefault((element_ty.name, *self.sizes), self).serial or next(SERIALS)

    return begin


def begin_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.known.dimensions, type.known.product) if type.is_block() else POINT


def plain(values: Any) -> bool:
    """Whether these are numbers that no constexpr surrounds."""
    return type(values) is list and all(type(value) is int for value in values)


def equal(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Whether two shapes are the same, without making a tuple of either."""

    def compare(self: Any, other: Any) -> Any:
        values = other.values if type(other) is core.tuple else other
        return core.constexpr(self.values == values) if plain(values) else own(self, other)

    return compare
