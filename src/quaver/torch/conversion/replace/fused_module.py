"""`FusedModule`, a module whose forward a Quaver block replaces, and when its own forward must run all the same."""

import functools
import inspect
import types
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import global_names, original_class, unconverted_class
from quaver.torch.conversion.probe import OF_ALL
from quaver.torch.linear.fused_projections import is_bare
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations import ops
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.operations.ops import any_autocast_enabled

#: Attributes that transformers sets on loaded or initialized modules and that no forward reads.
NOTES = {"_is_hf_initialized"}
#: (name, value) pairs of attributes.
Named = tuple[tuple[str, Any], ...]
#: Attribute types that are compared by value.
PLAIN = str, int, float, bool, type(None), torch.dtype
#: Dtypes that blocks support because they were compared. In float16 a forward may differ, for example clamp.
DTYPES = (torch.float32, torch.bfloat16)


class FusedModule(nn.Module):
    """Base of classes that replace a module's forward by a Quaver block, keeping its parameters, children and hooks.

    The class of each module is created by `quaver.torch.conversion.matchers.swap_class`.
    """

    #: Formula of the block: its computation, and the names of the children and parameters that it uses.
    _formula: Any
    #: The original class, and those of its members that were compared with the block.
    _original: Any
    _compared: Named


# ---- attributes ----


def fixed(attributes: Mapping[str, Any]) -> Named:
    """Return the attributes that are compared by value: numbers, strings, tuples of them, and functions."""
    own = ((name, value) for name, value in attributes.items() if name not in OF_ALL and name not in NOTES)
    return tuple((name, value) for name, value in own if _is_comparable(value))


def _is_comparable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, FunctionType, BuiltinFunctionType))


def reason_mutable(attributes: Mapping[str, Any]) -> str:
    """Return why a module with mutable attributes cannot be replaced, or "": a write to one could not be detected."""
    for name, value in attributes.items():
        if name not in OF_ALL and name not in NOTES and isinstance(value, Tensor | list | dict | set):
            return f"its {name} is a {type(value).__name__}, and a write to it could not be detected"
    return ""


def changed(attributes: Mapping[str, Any], before: Named) -> bool:
    """Return True if an attribute differs from the value that `fixed` recorded."""
    for name, value in before:
        now = attributes.get(name, nn.Module)
        if now is not value and (type(now) is not type(value) or now != value):
            return True
    return False


def attribute_key(module: nn.Module | None, ignored: frozenset[str] = frozenset()) -> Any:
    """Return a key that is equal for modules that compute the same function of their parameters.

    A linear layer is described only by its sizes and dtypes, other modules by `class_key`.

    Args:
        module: the module, or None.
        ignored: attributes to ignore.
    """
    if module is None:
        return None
    size = sizes(module)
    if size is not None:
        return size, *(None if p is None else p.dtype for p in module._parameters.values())
    return class_key(module, ignored)


def class_key(module: nn.Module, ignored: frozenset[str] = frozenset()) -> Any:
    """Return the class, plain attributes by value, others by identity, and the shapes and dtypes of the parameters."""
    compared_by_value = tuple((k, v) for k, v in fixed(module.__dict__) if k not in ignored)
    names = {*OF_ALL, *ignored, *(name for name, _ in compared_by_value)}
    own = compared_by_value, tuple((k, id(v)) for k, v in module.__dict__.items() if k not in names)
    shapes = tuple((k, None if p is None else (p.shape, p.dtype)) for k, p in module._parameters.items())
    return type(module), original_class(module).forward, own, shapes


def sizes(part: nn.Module | None) -> tuple[int, int, bool] | None:
    """Return (input features, output features, has bias) of a linear layer, or None for other modules."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        features = [getattr(part, name, None) for name in names]
        if isinstance(features[0], int) and isinstance(features[1], int):
            return features[0], features[1], getattr(part, "bias", None) is not None
    return None


# ---- when the module's own forward runs ----


def needs_original(module: FusedModule, *inputs: Any) -> bool:
    """Return True if a module's own forward must run on these inputs.

    That is so if its class or attributes have changed since the comparison, if an input is not a plain tensor of a
    supported dtype, or if a function transform is active that the block's autograd functions do not support.
    """
    if patched(module) or changed(module.__dict__, module._formula.attributes):
        return True
    return any(unsupported_input(x) for x in inputs)


def unsupported_input(x: Any) -> bool:
    """Return True if blocks do not support x: see `needs_original`."""
    if is_tracing():
        return not isinstance(x, Tensor) or x.dtype not in DTYPES or _narrowed(x)
    if (x.__class__ is not Tensor and x.__class__ is not nn.Parameter) or x.dtype not in DTYPES or x.is_nested:
        return True
    return (any_autocast_enabled() and _narrowed(x)) or transforms_active() or forward_level() >= 0


def _narrowed(x: Tensor) -> bool:
    """Return True if torch.autocast gives x's operations a dtype that was not compared."""
    kind = ops.autocast_device(x)
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) not in DTYPES


def replaced(module: FusedModule) -> bool:
    """Return True if the class's forward is no longer the one that was compared."""
    kind = type(module)
    return kind._original.forward is not dict(kind._compared)["forward"]


def patched(module: FusedModule, called: bool = False) -> bool:
    """Return True if the class or the instance overrides the forward, or a function it calls, since the comparison.

    Args:
        module: the replaced module.
        called: True ignores an instance forward that wraps the class's (functools.wraps), as accelerate's does in mixed
            precision; that wrapper is the caller.
    """
    kind = type(module)
    for name, value in kind._compared:
        if name in module.__dict__ and not (called and name == "forward" and _wraps(module, kind)):
            return True
        if getattr(kind._original, name, None) is not value:
            return True
    return False


def _wraps(module: FusedModule, kind: type) -> bool:
    """Return True if the instance's forward wraps its class's, by functools.wraps."""
    forward = module.__dict__["forward"]
    return not is_tracing() and inspect.unwrap(getattr(forward, "__func__", forward)) is kind.forward  # type: ignore[attr-defined]


def bypassed_child(module: nn.Module, skipped: tuple[tuple[str, type, Named], ...]) -> str:
    """Return the name of a child that the block would bypass but must not, or "".

    That is a child that has a hook or whose class or attributes have changed.

    Args:
        module: the module.
        skipped: name, class and attributes of the children that the block bypasses, as they were compared.
    """
    for name, kind, attributes in skipped:
        part = module._modules.get(name)
        if part is None or unconverted_class(part) is not kind or not is_bare(part):
            return name
        if changed(part.__dict__, attributes):
            return name
    return ""


# ---- functions of transformers' modeling files ----


def same_code(function: Any, reference: Any) -> bool:
    """Return True if a function runs the same instructions as a reference in one of our files.

    transformers copies one text into the files of many families. Names of local variables and annotations may differ,
    and so may the text of a docstring. Names that are global here must be the same objects there, or functions with the
    same code. For a Llama of two layers, this takes a tenth of the time of the check by numbers.
    """
    ours, theirs = (getattr(f, "__code__", None) for f in (reference, function))
    if ours is None or theirs is None or ours.co_code != theirs.co_code:
        return False
    if (ours.co_names, ours.co_argcount) != (theirs.co_names, theirs.co_argcount):
        return False
    for name in ours.co_names:
        mine, other = (f.__globals__.get(name) for f in (reference, function))
        if name in reference.__globals__ and mine is not other and not same_code(other, mine):
            return False
    return list(map(_constant, ours.co_consts)) == list(map(_constant, theirs.co_consts))


def _constant(value: Any) -> Any:
    return str if isinstance(value, str) else value


def with_functions(forward: Any, functions: Mapping[str, Any], snapshot: bool = False) -> Any:
    """Return a copy of a function, and of its decorators, with these functions among its globals.

    Args:
        forward: the function.
        functions: functions to override, by name.
        snapshot: True copies the globals that the function uses now to a plain dict, as torch.compile requires.
    """
    decorated = getattr(forward, "__wrapped__", None)
    if decorated is not None:
        inner = with_functions(decorated, functions, snapshot)
        cells = [types.CellType(inner) if c.cell_contents is decorated else c for c in forward.__closure__ or ()]
        return functools.update_wrapper(_copied(forward, forward.__globals__, tuple(cells)), inner)
    found: dict[str, Any] = forward.__globals__
    if not snapshot:
        return _copied(forward, OverlaidNames(found, functions), forward.__closure__)
    # Leave out `__name__`: torch.compile would look names up in that module.
    plain = {name: found[name] for name in ("__builtins__", *global_names(forward.__code__)) if name in found}
    return _copied(forward, plain | dict(functions), forward.__closure__)


def _copied(function: Any, names: dict[str, Any], closure: Any) -> Any:
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class OverlaidNames(dict[str, Any]):
    """Dict of globals with some names overridden; all others are looked up in the original module at access."""

    def __init__(self, others: dict[str, Any], own: Mapping[str, Any]) -> None:
        super().__init__(own, __builtins__=others["__builtins__"], __name__=others["__name__"])
        self.others = others

    def __missing__(self, name: str) -> Any:
        return self.others[name]
