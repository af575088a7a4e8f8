"""Swap the class of a module in place for one with another forward, and restore it.

The module stays the same object, with its parameters, hooks and attributes. The new class derives from the old one, so
isinstance checks still succeed.
"""

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from quaver.torch.linear.linear import Linear

# ---- swapping ----

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
            names.extend(getattr(getattr(function, "__code__", None), "co_names", ()))
    return tuple(item for item in read.items() if item[0] not in shadowed)


def original(kind: type) -> type | None:
    """Return the class that `counterpart` was called with, or None for a class that it did not create."""
    return nn.Linear if kind is Linear else vars(kind).get("_original")


def unconverted_class(module: nn.Module) -> type:
    """Return a module's class without the one that a parametrization put above it."""
    kind = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


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


# ---- numerical check that an nn.Linear subclass computes F.linear ----
#
# The subclass's forward runs on a small dummy layer with the same attributes but other sizes. Outputs, dtypes and
# gradients are compared with `F.linear`, in training and evaluation mode, for inputs of all magnitudes, infinities and
# NaN. A layer with parameters, buffers or modules besides weight and bias is never accepted, since they may matter
# later (LoRA's start at zero). Falcon's layers pass.

#: Input and output features of the dummy layer.
SIZES = 8, 5
#: Largest difference relative to the row's largest value; the order of summation may differ.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}

#: Attribute types that may be part of a cache key for layers of one class.
PLAIN = str, int, float, bool, type(None), torch.dtype

_computes: dict[Any, bool] = {}


def computes_a_linear(module: nn.Linear) -> bool:
    """Return True if a layer's own forward computes what nn.Linear's does."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    if set(module._parameters) - {"weight", "bias"} or module._modules or module._buffers:
        return False
    own = {name: value for name, value in module.__dict__.items() if name not in _OF_ALL}
    # No cache key if the layer is parametrized or has attributes that are unhashable or would be kept alive by the
    # cache.
    plain = "bias" in module._parameters and all(isinstance(value, PLAIN) for value in own.values())
    key = (kind, kind.forward, module._parameters["bias"] is None, tuple(sorted(own.items()))) if plain else None
    known = None if key is None else _computes.get(key)
    if known is None:
        try:
            # The result must not depend on the caller's inference mode or autocast.
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                known = all(_agrees(module, own, dtype, training) for dtype in BOUNDS for training in (True, False))
        except Exception:
            # Tensors have no values here, for example under FakeTensorMode.
            return False
        if key is not None:
            _computes[key] = known
    return known


#: Attributes that every nn.Linear has; none of them changes what it computes.
_OF_ALL = {*nn.Linear(1, 1, dtype=torch.float32, device="meta").__dict__, "recipe", "seed", "qualified_name", "_state"}


def _agrees(module: nn.Linear, own: dict[str, Any], dtype: torch.dtype, training: bool) -> bool:
    k, n = SIZES
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn((n, k), generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    bias = None if module._parameters.get("bias") is None else torch.arange(n, dtype=dtype, device="cpu")
    for x in _inputs(k, dtype, generator):
        stand_in = type(module).__new__(type(module))
        nn.Module.__init__(stand_in)
        stand_in.__dict__.update({name: _copy_for_comparison(value) for name, value in own.items()})
        stand_in.__dict__.update(in_features=k, out_features=n, training=training)
        stand_in._parameters.update(
            weight=nn.Parameter(weight.clone()), bias=None if bias is None else nn.Parameter(bias.clone())
        )
        before = {
            name: _copy_for_comparison(value) for name, value in stand_in.__dict__.items() if not name.startswith("_")
        }
        try:
            with torch.random.fork_rng(devices=[]):
                results = differentiated(type(module).forward, stand_in, (x,))
        except Exception:
            # Its forward needs more arguments, or other sizes, than nn.Linear's.
            return False
        after = {name: value for name, value in stand_in.__dict__.items() if not name.startswith("_")}
        with torch.random.fork_rng(devices=[]):
            expected = differentiated(lambda layer, x: F.linear(x, layer.weight, layer.bias), stand_in, (x,))
        if not all(map(close, results, expected)) or repr(after) != repr(before):
            return False
    return True


def _inputs(k: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield test inputs: a matrix and a batch with rows of all magnitudes, and one with infinity and NaN."""
    x = torch.randn((6, k), generator=generator, dtype=torch.float32, device="cpu")
    yield (x * torch.logspace(-4, 4, 6, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    yield x.view(2, 3, k).to(dtype)
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, 3e4
    yield x.to(dtype)


def differentiated(function: Callable[..., Any], module: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the output of function(module, *x), and the gradients of x and of the module's parameters.

    It seeds only the CPU generator, which callers restore; torch.manual_seed would also seed the GPUs'.
    """
    torch.default_generator.manual_seed(0)
    leaves = [a.clone().requires_grad_() for a in x]
    with torch.enable_grad():
        y = function(module, *leaves)
    if not isinstance(y, Tensor):
        raise TypeError(f"its forward returns a {type(y).__name__}")
    g = torch.linspace(-1, 1, y.numel(), dtype=torch.float32, device="cpu").view(y.shape).to(y.dtype)
    taken = [*leaves, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, taken, g, allow_unused=True)]


def first_of(outputs: Any) -> Tensor:
    """Return a module's output, or the first one if it returns several."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first


def close(a: Tensor | None, b: Tensor | None, within: torch.dtype | None = None) -> bool:
    """Return True if two results agree: shape, dtype, positions of NaN and infinity, and rows within the bound.

    Args:
        a: a result, or None.
        b: the expected result, or None.
        within: dtype whose bound applies; None for their own.
    """
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    bound, finite = BOUNDS[within or a.dtype], a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(posinf=1.0, neginf=-1.0).float(), b.nan_to_num(posinf=1.0, neginf=-1.0).float()
    rows = b.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return bool(((a - b).abs() <= bound * rows).all())


def _copy_for_comparison(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else value
