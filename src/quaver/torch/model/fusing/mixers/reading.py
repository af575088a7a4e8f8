"""Which layers a module multiplies by without calling them: read off the text of its forward.

A layer whose weight its parent hands to a function is never run: Mamba's `dt_proj.weight @ dt`, WavLM's projections.
Converted it would be quantized in name alone.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from quaver.torch.model.reach.exchanging import bare_class

#: Functions of transformers that compute a mixer from its projected input on, its projection out included; without
#: their package they give None, and the mixer goes on by its layers.
WHOLE = re.compile(r"^mamba\w*(inner_fn|scan_combined)$")
#: What is asked of a weight without multiplying by it.
HARMLESS = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda", "is_meta"}


class Uses(NamedTuple):
    """How a forward uses one of its module's parts."""

    #: Whether it reads the weight, and whether it does so in the arguments of functions of `WHOLE` alone.
    reads: bool = False
    inside_alone: bool = True
    #: Whether it does anything else with the part, such as calling it.
    calls: bool = False


def bypassed(module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> dict[nn.Module, str]:
    """The layers right in a module whose weight its forward multiplies by in their stead, and why each is left alone.

    Args:
        is_layer: whether a part is a layer that multiplies by a weight.
    """
    layers = {name: part for name, part in module._modules.items() if part is not None and is_layer(part)}
    if not layers or "forward" in module.__dict__:
        return {}
    kind = original_class(module)
    used = uses(kind, kind.forward)
    mixes, reasons = is_mixer(module), {}
    for name, layer in layers.items():
        use = used.get(name, Uses())
        # Of a mixer's layers one reading is enough: it may call them in evaluation, and read them in training.
        if use.reads and not (use.calls and (use.inside_alone or not mixes)):
            reasons[layer] = f"{kind.__name__} multiplies by its weight without calling it"
    return reasons


def is_mixer(module: nn.Module) -> bool:
    """True for a mixer of a state space, by the name of its decays in all families."""
    return "A_log" in module._parameters


def original_class(module: nn.Module) -> Any:
    """A module's class as its library made it."""
    kind: Any = bare_class(module)
    while "_original" in vars(kind):
        kind = kind._original
    return kind


def whole_functions(forward: Any) -> tuple[str, ...]:
    """The functions of `WHOLE` that a forward calls, where each of them gives None without its package."""
    plain = inspect.unwrap(forward)
    names = [name for name in getattr(plain, "__code__", is_mixer.__code__).co_names if WHOLE.match(name)]
    functions = [plain.__globals__.get(name) for name in names]
    return tuple(names) if functions and all(map(_gives_none, functions)) else ()


def _gives_none(function: Any) -> bool:
    try:
        plain = inspect.unwrap(function)
        needed = [p for p in inspect.signature(plain).parameters.values() if p.default is p.empty]
        given = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
        return plain(*given) is None
    except Exception:
        return False


@functools.lru_cache(maxsize=1024)
def uses(kind: type, forward: Any) -> dict[str, Uses]:
    """What a forward, and the methods that it calls, do with the module's parts, by their names; nothing where no
    weight is read, or where there is no text."""
    functions = list(_reached(kind, forward))
    if not any("weight" in _names(function.__code__) for function in functions):
        return {}
    used: dict[str, Uses] = {}
    for function in functions:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue
        for name, use in _of_text(tree):
            before = used.get(name, Uses())
            used[name] = Uses(
                before.reads or use.reads, before.inside_alone and use.inside_alone, before.calls or use.calls
            )
    return used


def _reached(kind: type, forward: Any) -> Iterator[Any]:
    """The forward and the methods of the class that it calls, without what decorates them."""
    names, seen = ["forward"], set[str]()
    while names:
        name = names.pop()
        if name in seen or (hasattr(nn.Module, name) and name != "forward"):
            continue
        seen.add(name)
        held: Any = forward if name == "forward" else getattr(kind, name, None)
        member = inspect.unwrap(held) if callable(held) else held
        if hasattr(member, "__code__"):
            yield member
            names += _names(member.__code__)


def _names(code: Any) -> list[str]:
    inner = [name for const in code.co_consts if hasattr(const, "co_names") for name in _names(const)]
    return [*code.co_names, *inner]


def _of_text(tree: ast.AST) -> Iterator[tuple[str, Uses]]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        above = parents.get(node)
        if not isinstance(above, ast.Attribute) or above.attr == "forward":
            yield node.attr, Uses(calls=True)
        elif above.attr == "weight":
            asked = parents.get(above)
            if not (isinstance(asked, ast.Attribute) and asked.attr in HARMLESS):
                yield node.attr, Uses(reads=True, inside_alone=_inside(above, parents))


def _inside(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a node stands among the arguments of a function of `WHOLE`."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and WHOLE.match(node.func.id):
            return True
    return False
