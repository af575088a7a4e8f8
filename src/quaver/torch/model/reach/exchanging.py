"""The class of a module exchanged for one that computes otherwise, as a recipe or a block says, and given back.

The module stays the object that it is, with its parameters, hooks and attributes. Its new class stands above the old
one, so that code which asks for the old class still gets it.
"""

import copy
import inspect
from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from quaver.torch.linear.layer import Linear

#: The classes made here, by the class that is converted, what stands above it, and its formula.
_counterparts: dict[tuple[type, type, Hashable], type] = {(nn.Linear, Linear, None): Linear}

#: Of a class that says how a module lies on ranks, and stands above whatever class the module has.
PUT_ABOVE = "_put_above"


def exchange(module: nn.Module, over: type, formula: Hashable = None) -> None:
    """Put a class above a module's own."""
    _set_class(module, counterpart(bare_class(module), over, formula))


def give_back(module: nn.Module) -> bool:
    """Give a module the class that it had; False for one that was not exchanged."""
    before = _given_back(bare_class(module))
    if before is None:
        return False
    _set_class(module, before)
    return True


def _given_back(kind: type) -> type | None:
    """What a class was before it was exchanged, under the classes that have been put above it since."""
    if not _was_put_above(kind):
        return original(kind)
    bases = tuple(_given_back(base) or base for base in kind.__bases__)
    if bases == kind.__bases__:
        return None
    return type(kind.__name__, bases, {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")})


def _was_put_above(kind: type) -> bool:
    """Whether a class was made to stand above a module's own: by a parallel style, or by torch's fully_shard."""
    return PUT_ABOVE in vars(kind) or any(base.__name__ == "FSDPModule" for base in kind.__bases__)


def counterpart(kind: Any, over: type, formula: Hashable = None) -> type:
    """The class that a module of a class gets.

    Args:
        kind: what is converted.
        over: `Linear` for an nn.Linear and its subclasses, whose own methods come first but for the forward; else a
            class whose methods come before those of `kind`; its `forward_like`, if any, makes the forward.
        formula: what else `over` goes by, as the attribute `_formula` of the class; it is pickled with the module.
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
        # Another thread may have made one: a class is one object.
        _counterparts.setdefault(key, type(kind.__name__, bases, members))
    return _counterparts[key]


def read_of_class(kind: Any, formula: Any) -> tuple[tuple[str, Any], ...]:
    """The forward of a class, and what it and the functions that it calls read of the class, by name, unless the
    instance has an attribute of that name."""
    names, read = ["forward"], dict[str, Any]()
    shadowed = dict(getattr(formula, "attributes", ()))
    while names:
        name = names.pop()
        if name in read or (hasattr(nn.Module, name) and name != "forward"):
            continue
        member = getattr(kind, name, None)
        if member is None or member is not getattr(kind, name):
            # Bound anew at each look.
            continue
        read[name] = member
        for function in (member, inspect.unwrap(member)) if callable(member) else ():
            names.extend(getattr(getattr(function, "__code__", None), "co_names", ()))
    return tuple(item for item in read.items() if item[0] not in shadowed)


def original(kind: type) -> type | None:
    """What `counterpart` was given; None for classes that it did not make."""
    return nn.Linear if kind is Linear else vars(kind).get("_original")


def bare_class(module: nn.Module) -> type:
    """A module's class without the one that a parametrization has put above it."""
    kind = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


def _set_class(module: nn.Module, base: type) -> None:
    """Exchange a module's class.

    A parametrized module has a class of its own above the one to exchange, which copies of it share: it gets another
    rather than other bases.
    """
    kind = type(module)
    if is_parametrized(module):
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        base = type(kind.__name__, (base,), {**members, "__deepcopy__": _copied})
    module.__class__ = base


def _copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deepcopy a parametrized module, whose class refuses to be pickled."""
    copied: nn.Module = type(self).__new__(type(self))
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(self.__dict__, memo))
    return copied


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a module of a class that was made here: by the class it was made from."""
    kind = type(module)
    return _rebuild, (kind._original, kind._over, kind._formula), module.__getstate__()


def _rebuild(kind: type, over: type, formula: Hashable = None) -> Any:
    exchanged: Any = counterpart(kind, over, formula)
    return exchanged.__new__(exchanged)
