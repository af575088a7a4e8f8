"""The class of a module exchanged for one that computes otherwise, as a recipe or a block says, and given back.

The module stays the object that it is, with its parameters, hooks and attributes. Its new class stands above the old
one, so that code which asks for the old class still gets it.
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

# ---- exchanging ------------------------------------------------------------------------------------------

#: The classes made here, by the class that is converted, what stands above it, and its formula.
_counterparts: dict[tuple[type, type, Hashable], type] = {(nn.Linear, Linear, None): Linear}

#: Of a class that says how a module lies on ranks, and stands above whatever class the module has.
PUT_ABOVE = "_put_above"


def exchange(module: nn.Module, over: type, formula: Hashable = None) -> None:
    """Put a class above a module's own."""
    _set_class(module, counterpart(unconverted_class(module), over, formula))


def restore_class(module: nn.Module) -> bool:
    """Give a module the class that it had; False for one that was not exchanged."""
    before = _given_back(unconverted_class(module))
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


def unconverted_class(module: nn.Module) -> type:
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


# ---- same ------------------------------------------------------------------------------------------------
# Whether two functions compute the same, asked of their outputs and gradients: so are subclasses of nn.Linear taken.
#
# The forward of a subclass runs on a small stand-in for the layer, with its attributes and other sizes, and is compared
# with `F.linear`: outputs, dtypes and gradients, in training and in evaluation, for inputs of all sizes, infinities and
# NaN. A layer with parameters, buffers or modules beside weight and bias is never taken: they may count later (LoRA's
# begin at zero). Falcon's layers pass.

#: Features of the stand-in.
SIZES = 8, 5
#: By how much outputs may differ, relative to the largest of a row: the order of a sum is free.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}

#: Attributes that tell layers of one class apart.
PLAIN = str, int, float, bool, type(None), torch.dtype

_computes: dict[Any, bool] = {}


def computes_a_linear(module: nn.Linear) -> bool:
    """True if a layer's own forward gives what nn.Linear's gives."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    if set(module._parameters) - {"weight", "bias"} or module._modules or module._buffers:
        return False
    own = {name: value for name, value in module.__dict__.items() if name not in _OF_ALL}
    # It may be parametrized, or have attributes that are no key, or that a key would hold alive.
    plain = "bias" in module._parameters and all(isinstance(value, PLAIN) for value in own.values())
    key = (kind, kind.forward, module._parameters["bias"] is None, tuple(sorted(own.items()))) if plain else None
    known = None if key is None else _computes.get(key)
    if known is None:
        try:
            # What is asked is not what surrounds the call.
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                known = all(_agrees(module, own, dtype, training) for dtype in BOUNDS for training in (True, False))
        except Exception:
            # Tensors have no values here, as under FakeTensorMode.
            return False
        if key is not None:
            _computes[key] = known
    return known


#: Attributes of every nn.Linear: none of them makes one compute something else.
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
            # It wants what an nn.Linear does not: more arguments, other sizes.
            return False
        after = {name: value for name, value in stand_in.__dict__.items() if not name.startswith("_")}
        with torch.random.fork_rng(devices=[]):
            expected = differentiated(lambda layer, x: F.linear(x, layer.weight, layer.bias), stand_in, (x,))
        if not all(map(close, results, expected)) or repr(after) != repr(before):
            return False
    return True


def _inputs(k: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Tensor]:
    """Matrices and batches, rows of every size, and what is not finite."""
    x = torch.randn((6, k), generator=generator, dtype=torch.float32, device="cpu")
    yield (x * torch.logspace(-4, 4, 6, dtype=torch.float32, device="cpu")[:, None]).to(dtype)
    yield x.view(2, 3, k).to(dtype)
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, torch.nan, 3e4
    yield x.to(dtype)


def differentiated(function: Callable[..., Any], module: nn.Module, x: Sequence[Tensor]) -> list[Tensor | None]:
    """The output of (module, *x), and the gradients of the inputs and of the module's parameters.

    It seeds the CPU's generator alone, which callers give back: torch.manual_seed would set a GPU's too.
    """
    torch.default_generator.manual_seed(0)
    given = [a.clone().requires_grad_() for a in x]
    with torch.enable_grad():
        y = function(module, *given)
    if not isinstance(y, Tensor):
        raise TypeError(f"its forward returns a {type(y).__name__}")
    g = torch.linspace(-1, 1, y.numel(), dtype=torch.float32, device="cpu").view(y.shape).to(y.dtype)
    taken = [*given, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, taken, g, allow_unused=True)]


def first_of(outputs: Any) -> Tensor:
    """What a module gives: a tensor, or the first of several."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first


def close(a: Tensor | None, b: Tensor | None, within: torch.dtype | None = None) -> bool:
    """Whether two results agree: both there, of one shape and dtype, finite at the same places, rows within the bound
    of a dtype, or of their own."""
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
