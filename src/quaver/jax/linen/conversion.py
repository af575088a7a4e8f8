"""Run the linear layers of any linen model under recipes, by a method interceptor; the model's code stays as it is."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax import Array

from quaver.jax.conversion.layer_rules import LayerRules
from quaver.jax.linears.dot_general import normalize_axes
from quaver.jax.linen.dense import DenseGeneral, DotGeneral, dot_general_cls, qualified_name
from quaver.recipes.conversion import ConversionReport, Rules, Skip, uses_of
from quaver.recipes.spec import Recipe

# The conversion in force, as part of jit's cache key: a submodule in nn.jit is traced again for another one.
_conversion = jax.make_user_context(default_value=None)


class ConvertedModule:
    """A linen model whose linear layers run under recipes; made by `convert`.

    `init`, `apply`, `init_with_output`, `lazy_init` and `tabulate` are those of the model, with the recipes; instead of
    `bind` call `apply` with a method. Every other attribute is the model's own. Parameters have the same names; the
    state of recipes is in the collection `quaver.jax.linen.COLLECTION`.

    Attributes:
        module: the model.
        report: which layers run under which recipe; a layer is added when the model is first traced through it.
    """

    def __init__(self, module: nn.Module, intercept: Callable[..., Any], report: ConversionReport) -> None:
        self.module = module
        self.report = report
        self._intercept = intercept

    def init(self, *args: Any, **options: Any) -> Any:
        return self._converted(self.module.init, *args, **options)

    def init_with_output(self, *args: Any, **options: Any) -> Any:
        return self._converted(self.module.init_with_output, *args, **options)

    def lazy_init(self, *args: Any, **options: Any) -> Any:
        return self._converted(self.module.lazy_init, *args, **options)

    def apply(self, *args: Any, **options: Any) -> Any:
        return self._converted(self.module.apply, *args, **options)

    def tabulate(self, *args: Any, **options: Any) -> Any:
        return self._converted(self.module.tabulate, *args, **options)

    def bind(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            "a converted model has no bind, whose calls would run unconverted; call apply(variables, ..., method=...)"
        )

    def _converted(self, method: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        with _conversion(self._intercept), nn.intercept_methods(self._intercept):
            return method(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __repr__(self) -> str:
        return f"ConvertedModule({self.module!r})"


def convert(
    module: nn.Module,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    head: bool = False,
    seed: int = 0,
    uses: int | Mapping[str, int] = 1,
) -> tuple[ConvertedModule, ConversionReport]:
    """Return a model whose linear layers run under the recipes that the rules select, and a report.

    Linear layers are nn.Dense, nn.DenseGeneral and this package's DenseGeneral, also inside other modules such as
    nn.MultiHeadDotProductAttention. Layer names are paths with dots, "encoder.layers_0.Dense_1".

    Args:
        module: the outermost module, which `init` and `apply` are called on.
        recipe: a recipe or recipe name for all layers, or `Rules`, or the dict that `Rules` takes.
        skip: name patterns to leave alone, and filters such as `quaver.rules.unprofitable("h100")`.
        head: convert the output head too: a layer with a usual name, such as "lm_head", and as many features as an
            nn.Embed before it has embeddings.
        seed: seed of stochastic rounding.
        uses: number of calls of a layer in one step, for recipes with state: one number, or a dict by name patterns.
    Returns:
        The converted model, and its report, which is complete when `init` or `apply` was traced once.
    Raises:
        ValueError: an unknown recipe, or one that quantizes attention.
        TypeError: module is not a linen module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert takes a linen module, not a {type(module).__name__}")
    rules = LayerRules(recipe, skip, head)
    # Known while the model is traced: an output head comes after the embedding.
    vocabularies: set[int] = set()
    decided: dict[str, Recipe | None] = {}

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, nn.Embed):
            vocabularies.add(layer.num_embeddings)
        slot = _slot_of(layer)
        if slot is None or context.method_name != "__call__":
            return call(*args, **options)
        name, x = qualified_name(layer), args[0] if args else next(iter(options.values()))
        if name not in decided:
            decided[name] = rules.decide(name, _features(layer, x), _unsupported(layer), vocabularies)
        wanted = decided[name]
        if wanted is None:
            return call(*args, **options)
        number = uses_of(name, uses)
        return _call_with(layer, _options(slot, wanted, seed, number), call, args, options)

    return ConvertedModule(module, intercept, rules.report), rules.report


def _slot_of(layer: Any) -> str | None:
    """Return the attribute of a linear layer that selects its recipe; None for other modules."""
    if isinstance(layer, DenseGeneral):
        return "recipe"
    return "dot_general_cls" if isinstance(layer, nn.Dense | nn.DenseGeneral) else None


def _options(slot: str, recipe: Recipe, seed: int, uses: int) -> dict[str, Any]:
    if slot == "recipe":
        return {"recipe": recipe, "seed": seed, "uses": uses}
    return {"dot_general_cls": dot_general_cls(recipe, seed=seed, uses=uses)}


def _call_with(layer: Any, attributes: dict[str, Any], call: Any, args: Any, options: Any) -> Array:
    """Call a layer with other attributes, and restore its own afterwards."""
    own = {name: getattr(layer, name) for name in attributes}
    # Flax freezes the attributes of a module; this instance belongs to the current call of `apply`.
    for name, value in attributes.items():
        object.__setattr__(layer, name, value)
    try:
        return call(*args, **options)
    finally:
        for name, value in own.items():
            object.__setattr__(layer, name, value)


def _features(layer: Any, x: Any) -> tuple[int, int]:
    """Return (in, out) features of a linear layer that is called with x."""
    axes = normalize_axes(getattr(layer, "axis", -1), x.ndim)
    batch = {axis % x.ndim for axis in getattr(layer, "batch_dims", ())}
    out = layer.features if isinstance(layer.features, int) else math.prod(layer.features)
    return math.prod(x.shape[axis] for axis in axes if axis not in batch), out


def _unsupported(layer: Any) -> str:
    """Return why a layer cannot be converted, or ""."""
    if isinstance(layer, DenseGeneral):
        return ""
    slot = layer.dot_general_cls
    if slot is not None and getattr(slot, "func", slot) is not DotGeneral:
        return "it sets a custom dot_general_cls"
    if layer.dot_general is not None:
        return "it sets a custom dot_general"
    return ""
