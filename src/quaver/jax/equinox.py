"""Equinox: `convert` replaces the linear layers of a model by ones that run under recipes."""

from importlib.util import find_spec

if find_spec("equinox") is None:
    sentence = "quaver.jax.equinox needs Equinox, which is not installed: pip install equinox"
    raise ModuleNotFoundError(sentence, name="equinox")

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

from quaver.jax import state as states
from quaver.jax.conversion.layer_rules import LayerRules
from quaver.jax.linears.function import linear, unwrapped
from quaver.jax.state.context import StateReads, recipe_in_force, state_reads_of
from quaver.recipes.conversion import ConversionReport, Rules, Skip, uses_of
from quaver.recipes.spec import Recipe


class QuantizedLinear(eqx.nn.Linear):
    """eqx.nn.Linear under a recipe; made by `convert`.

    `jax.vmap` over tokens is one GEMM of all tokens, if it maps only the input: a scale per tensor is that of all
    tokens, as in a layer that takes a batch.

    Attributes:
        state: state of the recipe, {} for one without.
        recipe, name, seed, uses: as for `quaver.jax.linen.DenseGeneral`.
    """

    state: dict[str, Array]
    recipe: Recipe = eqx.field(static=True)
    name: str = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    uses: int = eqx.field(static=True)

    def __init__(self, layer: eqx.nn.Linear, recipe: Recipe, name: str, seed: int, uses: int) -> None:
        for field in ("weight", "bias", "in_features", "out_features", "use_bias"):
            setattr(self, field, getattr(layer, field))
        self.state = states.init(recipe, uses)
        self.recipe, self.name, self.seed, self.uses = recipe, name, seed, uses

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """Return [out_features] of x [in_features]; `key` is ignored, as in Equinox."""
        if recipe_in_force(self.recipe) is None:
            return super().__call__(x, key=key)
        state = states.use(self.state, self.uses, self.name or "this layer")
        reads = state_reads_of(state)
        return _linear(_Run(self.recipe, self.name, self.seed), reads, x, self.weight, self.bias, state)


# ---- one GEMM for all tokens of a vmap ----
#
# An Equinox layer takes one token, and models map it over tokens. Mapped plainly, each token would have scales of its
# own and a gradient of the weight. The two functions below are mapped as one call on all tokens instead. They are
# forward and backward of a custom_vjp, because JAX cannot differentiate a function with a vmap rule of its own.
# Backward quantizes the saved operands again: codes have static shapes, which such a rule may not change.


@dataclass(frozen=True)
class _Run:
    """Static arguments of `quaver.jax.linear`."""

    recipe: Recipe
    name: str
    seed: int


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(run: _Run, reads: StateReads, x: Array, weight: Array, bias: Any, state: Any) -> Array:
    return _of_tokens(partial(_apply, run), results=(True,))(x, weight, bias, state)[0]


def _forward(run: _Run, reads: StateReads, *operands: Any) -> tuple[Array, Any]:
    values, perturbed = unwrapped(*operands)
    return _linear(run, reads, *values), (values, jnp.zeros((*perturbed, 0)))


def _backward(run: _Run, reads: StateReads, saved: Any, g: Array) -> tuple[Any, ...]:
    operands, perturbed_as_shape = saved
    perturbed = tuple(map(bool, perturbed_as_shape.shape[-5:-1]))
    if perturbed[3] and reads.count > 1:
        raise ValueError(
            f"{run.name or 'this layer'}: {reads.count} calls read the same state in one step; convert it with "
            f"uses={reads.count}. A jax.vmap over tokens is one call"
        )
    gradients = iter(_of_tokens(partial(_pull, run, perturbed), results=perturbed)(g, *operands))
    return tuple(next(gradients) if needed else None for needed in perturbed)


_linear.defvjp(_forward, _backward, symbolic_zeros=True)


def _apply(run: _Run, x: Array, weight: Array, bias: Any, state: Any) -> tuple[Array]:
    """Return the layer's output [..., N] of x [..., K]."""
    y = linear(jnp.atleast_2d(x), weight.T, bias, state=state, **vars(run))
    return (y.reshape(*x.shape[:-1], y.shape[-1]),)


def _pull(run: _Run, perturbed: tuple[bool, ...], g: Array, *operands: Any) -> tuple[Any, ...]:
    """Return the gradients of the differentiated ones of x, weight, bias and state."""

    def of_inputs(*inputs: Any) -> Array:
        given = iter(inputs)
        return _apply(run, *(next(given) if p else a for a, p in zip(operands, perturbed, strict=True)))[0]

    _, pullback = jax.vjp(of_inputs, *(a for a, p in zip(operands, perturbed, strict=True) if p))
    gradients: tuple[Any, ...] = pullback(g)
    return gradients


def _of_tokens(function: Callable[..., tuple[Any, ...]], results: tuple[bool, ...]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that a vmap of activations calls once, on all tokens.

    Args:
        function: of activations, then weight, bias and state.
        results: for `_pull`, which gradients it returns; the first result is that of x if the first is True.
    """
    call = custom_vmap(function)

    @call.def_vmap
    def rule(size: int, mapped: Any, *operands: Any) -> tuple[Any, Any]:
        *activations, weight, bias, state = mapped
        if all(activations) and not any(jax.tree.leaves((weight, bias, state))):
            out = call(*operands)
            is_mapped = [results[0] and i == 0 for i in range(len(out))]
        else:
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
            out = jax.vmap(function, in_axes=tuple(axes), axis_size=size)(*operands)
            is_mapped = [True] * len(out)
        return out, tuple(jax.tree.map(lambda _, m=m: m, one) for one, m in zip(out, is_mapped, strict=True))

    return call


def convert(
    model: Any,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    head: bool = False,
    seed: int = 0,
    uses: int | Mapping[str, int] = 1,
) -> tuple[Any, ConversionReport]:
    """Return a copy of a model whose linear layers run under the recipes that the rules select, and a report.

    Linear layers are eqx.nn.Linear, also inside other modules such as eqx.nn.MultiheadAttention. The states of recipes
    are in the model: `quaver.jax.state.split` separates them from the parameters.

    Args:
        model: any Equinox module or pytree of modules.
        recipe: a recipe or recipe name for all layers, or `Rules`, or the dict that `Rules` takes.
        skip: name patterns to leave alone, and filters such as `quaver.rules.unprofitable("h100")`.
        head: convert the output head too: a layer with a usual name, such as "lm_head", and as many outputs as an
            eqx.nn.Embedding has embeddings.
        seed: seed of stochastic rounding.
        uses: number of calls of a layer in one step, for recipes with state: one number, or a dict by name patterns.
            A layer under `jax.vmap` over tokens is one call.
    Raises:
        ValueError: an unknown recipe, or one that quantizes attention.
    """
    rules = LayerRules(recipe, skip, head)
    vocabularies = {m.num_embeddings for m in _modules(model, eqx.nn.Embedding)}

    def one(path: Any, node: Any) -> Any:
        if not isinstance(node, eqx.nn.Linear):
            return node
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        inputs, outputs = (1 if n == "scalar" else n for n in (node.in_features, node.out_features))
        wanted = rules.decide(name, (inputs, outputs), _unsupported(node), vocabularies)
        return node if wanted is None else QuantizedLinear(node, wanted, name, seed, uses_of(name, uses))

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=_is_linear), rules.report


def revert(model: Any) -> Any:
    """Return a copy of a model with eqx.nn.Linear in place of converted layers; the states are dropped."""

    def one(node: Any) -> Any:
        if not isinstance(node, QuantizedLinear):
            return node
        plain = object.__new__(eqx.nn.Linear)
        for field in ("weight", "bias", "in_features", "out_features", "use_bias"):
            object.__setattr__(plain, field, getattr(node, field))
        return plain

    return jax.tree.map(one, model, is_leaf=_is_linear)


def _is_linear(node: Any) -> bool:
    return isinstance(node, eqx.nn.Linear)


def _modules(model: Any, kind: type) -> list[Any]:
    return [node for node in jax.tree.leaves(model, is_leaf=lambda m: isinstance(m, kind)) if isinstance(node, kind)]


def _unsupported(layer: Any) -> str:
    """Return why a layer cannot be converted, or ""."""
    if isinstance(layer, QuantizedLinear):
        return ""
    if "scalar" in (layer.in_features, layer.out_features):
        return "it has a scalar input or output"
    return "" if type(layer) is eqx.nn.Linear else f"{type(layer).__name__} is a class of its own"
