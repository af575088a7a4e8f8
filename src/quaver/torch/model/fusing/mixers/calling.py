"""A mixer that calls its layers in training too, where its forward would hand their weights to one function for all.

The forward that runs is the class's own, in a copy that finds other functions among its globals: nothing of the
framework is written to, and the convolution and the scan of a package that is installed go on running.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from quaver.torch.linear.layer import Quantizable
from quaver.torch.linear.stored import stored
from quaver.torch.model.fusing.fused import Fused, replaced
from quaver.torch.model.fusing.mixers.reading import is_mixer, original_class, whole_functions
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.state.context import recipe_in_force


class CalledMixer(Fused):
    """Stands above a class of mixers whose forward asks one function for all, while one of its layers is quantized."""

    #: The forward of the class below by its layers: in eager mode, and as compilers read it.
    _by_layers: tuple[Any, Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_original" in vars(cls):
            forward = cls._original.forward
            cls._by_layers = by_its_layers(forward, False), by_its_layers(forward, True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or replaced(self) or not layers_quantize(self):
            return super().forward(*args, **kwargs)
        return self._by_layers[is_tracing()](self, *args, **kwargs)


def calls_its_layers(module: nn.Module) -> bool:
    """True for a mixer that `CalledMixer` has call its layers."""
    return is_mixer(module) and bool(whole_functions(original_class(module).forward))


def layers_quantize(module: nn.Module) -> bool:
    """Whether a layer right in a module follows a recipe that quantizes now, or exists only as codes."""
    for layer in module._modules.values():
        if isinstance(layer, Quantizable):
            recipe = recipe_in_force(layer.recipe)
            weight = layer._parameters.get("weight")
            if (recipe is not None and recipe.quantizes) or (weight is not None and weight.dtype in stored.CODES):
                return True
    return False


def by_its_layers(forward: Any, snapshot: bool) -> Any:
    """The forward with functions for all that give None, after which it goes on by its layers."""
    return with_functions(forward, tuple((name, _nothing) for name in whole_functions(forward)), snapshot)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def with_functions(forward: Any, functions: tuple[tuple[str, Any], ...], snapshot: bool) -> Any:
    """A copy of a function, and of what decorates it, that finds these among its globals.

    Args:
        snapshot: its other globals are as they are now, in a plain dict, as compilers read them.
    """
    decorated = getattr(forward, "__wrapped__", None)
    if decorated is not None:
        inner = with_functions(decorated, functions, snapshot)
        cells = [types.CellType(inner) if c.cell_contents is decorated else c for c in forward.__closure__ or ()]
        copied = types.FunctionType(
            forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, tuple(cells)
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        return functools.update_wrapper(copied, inner)
    held: dict[str, Any] = forward.__globals__
    # Without the name of its module: that is where a compiler would look names up.
    plain = {name: value for name, value in held.items() if name != "__name__"}
    names = plain | dict(functions) if snapshot else Names(held, dict(functions))
    copied = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


class Names(dict[str, Any]):
    """Some names, and for all others those of a module as they are when they are asked for."""

    def __init__(self, others: dict[str, Any], own: Mapping[str, Any]) -> None:
        super().__init__(own, __builtins__=others["__builtins__"], __name__=others["__name__"])
        self.others = others

    def __missing__(self, name: str) -> Any:
        return self.others[name]
