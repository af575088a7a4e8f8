"""Convert the linear layers of any NNX model to run under recipes, in place, and revert them.

A layer keeps its class; only the operation in its slot `dot_general` or `einsum_op` changes. Layers of this package get
the recipe and their name.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from quaver.jax.conversion.layer_rules import LayerRules
from quaver.jax.nnx.dense import DenseGeneral, DotGeneral, Einsum, LayerState, OverwriteWithGradient
from quaver.jax.nnx.moe import GroupedDense
from quaver.recipes.conversion import ConversionReport, Rules, Skip, uses_of
from quaver.recipes.spec import Recipe


def convert(
    model: nnx.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    head: bool = False,
    seed: int = 0,
    uses: int | Mapping[str, int] = 1,
) -> ConversionReport:
    """Set the recipe of every linear layer that the rules select, in place.

    Linear layers are nnx.Linear, nnx.LinearGeneral, nnx.Einsum and this package's DenseGeneral and GroupedDense, also
    inside other modules. Convert outside of transforms; layers stacked by nnx.vmap get a stacked state.

    Args:
        model: any module; it may itself be a linear layer.
        recipe: a recipe or recipe name for all layers, or `Rules`, or the dict that `Rules` takes. A layer that already
            has this recipe keeps its state.
        skip: name patterns to leave alone, such as "lm_head", and filters such as `quaver.rules.unprofitable("h100")`:
            a list of them, or one filter.
        head: convert the output head too: a layer with a usual name, such as "lm_head", and as many outputs as an
            nnx.Embed has embeddings.
        seed: seed of stochastic rounding.
        uses: number of calls of a layer in one step, for recipes with state: one for all layers, or a dict by name
            patterns, such as {"encoder.*": 2}; layers that match none have 1.
    Returns:
        A report: converted layers, reasons for the others, and patterns that matched nothing.
    Raises:
        ValueError: an unknown recipe, or one that quantizes attention; raised before anything is changed.
    """
    rules = LayerRules(recipe, skip, head)
    report = rules.report
    report.others = _others(model)
    vocabularies = {m.num_embeddings for _, m in nnx.iter_modules(model) if isinstance(m, nnx.Embed)}
    for name, layer, kind in _layers(model):
        wanted = rules.decide(name, kind.features(layer), kind.unsupported(layer), vocabularies)
        if wanted is not None:
            kind.put(layer, wanted, name, seed, uses_of(name, uses))
    if not report.converted:
        warnings.warn(f"convert changed nothing:\n{report}", stacklevel=2)
    return report


def revert(model: nnx.Module) -> list[str]:
    """Undo `convert`: parameters stay, the state of recipes is dropped. Return the names of the layers."""
    return [name for name, layer, kind in _layers(model) if kind.take(layer)]


def plain_state(model: nnx.Module) -> nnx.State[Any, Any]:
    """Return `nnx.state(model)` without the state of recipes: that of the unconverted model, to save or publish.

    `nnx.update` restores it into an unconverted model, and into a converted one, whose histories and counts stay
    unchanged.
    """
    state: nnx.State[Any, Any] = nnx.state(model, nnx.Not(OverwriteWithGradient))
    return state


@dataclass(frozen=True)
class _OperationSlot:
    """A class of layers with a slot for the operation."""

    #: Attribute name of the slot, and class of the quantized operation.
    name: str
    operation: Any
    #: Default operation in the slot.
    default: Any
    #: Functions that return (in, out) features, and the number of axes of a kernel that is not stacked.
    features: Callable[[Any], tuple[int, int]]
    ndim: Callable[[Any], int]
    #: Class whose __call__ uses the slot.
    reader: type

    def unsupported(self, layer: Any) -> str:
        """Return why a layer cannot be converted, or ""."""
        if not isinstance(layer, nnx.LoRALinear) and type(layer).__call__ is not self.reader.__call__:
            return f"{type(layer).__name__} overrides __call__"
        if getattr(layer, "dot_general_cls", None) is not None:
            return "it sets a custom dot_general_cls"
        inside = getattr(layer, self.name)
        if inside is not self.default and inside is not jax.lax.dot_general and not isinstance(inside, self.operation):
            return f"it has a custom {self.name}"
        return ""

    def put(self, layer: Any, recipe: Recipe, name: str, seed: int, uses: int) -> None:
        inside = getattr(layer, self.name)
        slot = self.operation(recipe, seed=seed, name=name)
        slot.state = _stacked_state(recipe, layer.kernel, self.ndim(layer), uses)
        if isinstance(inside, self.operation) and _fits(inside.state, recipe, uses):
            slot.state = inside.state
        setattr(layer, self.name, nnx.data(slot))

    def take(self, layer: Any) -> bool:
        if not isinstance(getattr(layer, self.name), self.operation):
            return False
        setattr(layer, self.name, nnx.static(self.default))
        return True


class _OwnDenseGeneral:
    """Conversion of this package's DenseGeneral."""

    def features(self, layer: DenseGeneral) -> tuple[int, int]:
        shape = layer.kernel.shape[layer.kernel.ndim - layer.ndim :]
        return math.prod(shape[: len(layer.axis)]), math.prod(shape[len(layer.axis) :])

    def unsupported(self, layer: DenseGeneral) -> str:
        return ""

    def put(self, layer: DenseGeneral, recipe: Recipe, name: str, seed: int, uses: int) -> None:
        if not _fits(layer.state, recipe, uses):
            layer.state = _stacked_state(recipe, layer.kernel, layer.ndim, uses)
        layer.recipe, layer.name, layer.seed = recipe, name, seed

    def take(self, layer: DenseGeneral) -> bool:
        if layer.recipe is None:
            return False
        layer.recipe, layer.state = None, LayerState(None)
        return True


class _OwnGroupedDense(_OwnDenseGeneral):
    """Conversion of this package's GroupedDense, whose experts share one recipe and state."""

    def features(self, layer: Any) -> tuple[int, int]:
        inputs, *outputs = layer.kernel.shape[layer.kernel.ndim - layer.ndim + 1 :]
        return inputs, math.prod(outputs)


def _einsum_features(layer: Any) -> tuple[int, int]:
    """Return (in, out) features of an einsum: labels of the kernel that the result lacks are contracted."""
    operands, result = layer.einsum_str.split("->")
    labels = operands.split(",")[1].replace("...", "")
    sizes = dict(zip(labels, layer.kernel_shape, strict=True))
    summed = math.prod(n for label, n in sizes.items() if label not in result)
    return summed, math.prod(sizes.values()) // summed


_KINDS: dict[type, Any] = {
    DenseGeneral: _OwnDenseGeneral(),
    GroupedDense: _OwnGroupedDense(),
    nnx.Linear: _OperationSlot(
        "dot_general",
        DotGeneral,
        jax.lax.dot_general,
        lambda m: (m.in_features, m.out_features),
        lambda m: 2,
        nnx.Linear,
    ),
    nnx.LinearGeneral: _OperationSlot(
        "dot_general",
        DotGeneral,
        None,
        lambda m: (math.prod(m.in_features), math.prod(m.out_features)),
        lambda m: len(m.batch_axis) + len(m.in_features) + len(m.out_features),
        nnx.LinearGeneral,
    ),
    nnx.Einsum: _OperationSlot(
        "einsum_op", Einsum, jnp.einsum, _einsum_features, lambda m: len(m.kernel_shape), nnx.Einsum
    ),
}


def _kind_of(module: Any) -> Any:
    return next((kind for base, kind in _KINDS.items() if isinstance(module, base)), None)


def _layers(model: nnx.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield each linear layer with its name and its kind."""
    layers = [(path, module) for path, module in nnx.iter_modules(model) if _kind_of(module) is not None]
    for path, module in sorted(layers, key=lambda item: [(isinstance(p, str), p) for p in item[0]]):
        yield ".".join(map(str, path)), module, _kind_of(module)


def _others(model: nnx.Module) -> dict[str, int]:
    """Count, by class, the modules that own a matrix but are not linear layers."""
    return Counter(
        type(module).__name__
        for _, module in nnx.iter_modules(model)
        if _kind_of(module) is None
        and any(isinstance(value, nnx.Param) and value.ndim > 1 for value in vars(module).values())
    )


def _stacked_state(recipe: Recipe, kernel: nnx.Param[Any], ndim: int, uses: int) -> LayerState:
    """Return a fresh state with the leading axes that nnx.vmap added to the kernel."""
    return LayerState(recipe, kernel.shape[: kernel.ndim - ndim], uses)


def _fits(state: LayerState, recipe: Recipe, uses: int) -> bool:
    return state.of is recipe and state.uses == uses
