"""Swap the class of a module in place for one with another forward, and restore it.

The module stays the same object, with its parameters, hooks and attributes. The new class derives from the old one, so
isinstance checks still succeed.
"""

import copy
import inspect
from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from quaver.torch.linear.linear import Linear

#: Classes created here, by (original class, mixin above it, formula).
_counterparts: dict[tuple[type, type, Hashable], type] = {(nn.Linear, Linear, None): Linear}

#: Attribute of a class that parallel styles put above a module's class to describe its sharding.
PUT_ABOVE = "_put_above"


def exchange(module: nn.Module, over: type, formula: Hashable = None) -> None:
    """Change the class of a module to one with `over` above its own."""
    _set_class(module, counterpart(unconverted_class(module), over, formula))


def restore_class(module: nn.Module) -> bool:
    """Restore the module's original class; return False if it was not swapped."""
    before = _class_before_swap(unconverted_class(module))
    if before is None:
        return False
    _set_class(module, before)
    return True


def _class_before_swap(kind: type) -> type | None:
    """Return the class before the swap, under any classes put above it since; None if it was not swapped."""
    if not _was_put_above(kind):
        return original(kind)
    bases = tuple(_class_before_swap(base) or base for base in kind.__bases__)
    if bases == kind.__bases__:
        return None
    return type(kind.__name__, bases, {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")})


def _was_put_above(kind: type) -> bool:
    """Return True if a parallel style or torch's fully_shard put this class above a module's own."""
    return PUT_ABOVE in vars(kind) or any(base.__name__ == "FSDPModule" for base in kind.__bases__)


def counterpart(kind: Any, over: type, formula: Hashable = None) -> type:
    """Return the class that a module of class `kind` is swapped to; created once.

    Args:
        kind: the original class.
        over: `Linear` for nn.Linear and its subclasses, of which only forward is overridden. Otherwise a mixin whose
            methods take precedence over those of `kind`; if it has `forward_like`, that creates the forward.
        formula: further parameters of `over`, stored as class attribute `_formula` and pickled with the module.
    """
    key = kind, over, formula
    if key not in _counterparts:
        members: dict[str, Any] = {"__reduce_ex__": _reduce, "__module__": kind.__module__}
        members.update(_original=kind, _over=over, _formula=formula, _compared=read_of_class(kind, formula))
        bases: tuple[type, ...] = (over, kind)
        if over is Linear:
            bases = (kind, over)
            members["forward"] = Linear.forward
        elif hasattr(over, "forward_like"):
            members["forward"] = over.forward_like(kind)
        # Another thread may have created it in the meantime; keep a single class object.
        _counterparts.setdefault(key, type(kind.__name__, bases, members))
    return _counterparts[key]


def read_of_class(kind: Any, formula: Any) -> tuple[tuple[str, Any], ...]:
    """Return a class's forward and the class attributes that it and its callees read, by name.

    Attributes that instances override are left out.
    """
    names, read = ["forward"], dict[str, Any]()
    shadowed = dict(getattr(formula, "attributes", ()))
    while names:
        name = names.pop()
        if name in read or (hasattr(nn.Module, name) and name != "forward"):
            continue
        member = getattr(kind, name, None)
        if member is None or member is not getattr(kind, name):
            # Skip attributes that are created anew at each access.
            continue
        read[name] = member
        for function in (member, inspect.unwrap(member)) if callable(member) else ():
            names += global_names(getattr(function, "__code__", None))
    return tuple(item for item in read.items() if item[0] not in shadowed)


def global_names(code: Any) -> list[str]:
    """Return the names of globals and attributes that a function's code, and functions in it, use."""
    inner = [name for c in getattr(code, "co_consts", ()) if hasattr(c, "co_names") for name in global_names(c)]
    return [*getattr(code, "co_names", ()), *inner]


def original(kind: type) -> type | None:
    """Return the class that `counterpart` was called with, or None for a class that it did not create."""
    return nn.Linear if kind is Linear else vars(kind).get("_original")


def unconverted_class(module: nn.Module) -> type:
    """Return a module's class without the one that a parametrization put above it."""
    kind = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


def original_class(module: nn.Module) -> Any:
    """Return a module's class as its library defined it."""
    kind = unconverted_class(module)
    while (before := original(kind)) is not None:
        kind = before
    return kind


def _set_class(module: nn.Module, base: type) -> None:
    """Set a module's class.

    A parametrized module has a class of its own above the one to swap, which its copies share. It gets a new class,
    because changing the bases of the shared one would affect the copies.
    """
    kind = type(module)
    if is_parametrized(module):
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        base = type(kind.__name__, (base,), {**members, "__deepcopy__": _copied})
    module.__class__ = base


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deepcopy a parametrized module, whose class does not support pickling."""
    copied: nn.Module = type(self).__new__(type(self))
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(self.__dict__, memo))
    return copied


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a module of a class created here by its original class, mixin and formula."""
    kind = type(module)
    return _rebuild, (kind._original, kind._over, kind._formula), module.__getstate__()


def _rebuild(kind: type, over: type, formula: Hashable = None) -> Any:
    exchanged: Any = counterpart(kind, over, formula)
    return exchanged.__new__(exchanged)
