"""Arrays that no derivative may go through: where rounding would pass for a constant, or for the identity."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax import Array
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import custom_jvp

SECOND_DERIVATIVE = (
    "{}: quantized layers have no second derivative, and none in forward mode over a gradient: rounding has none. "
    "Compute the part that is differentiated twice in high precision, with quaver.jax.autocast(enabled=False), or put "
    "jax.lax.stop_gradient around the arguments of the inner gradient, if it is to count as a constant"
)

#: Sentences whose guard is kept: a layer's name is in them.
LAYERS = 4096


def constant(sentence: str, tree: Any) -> Any:
    """The same arrays. A derivative with respect to one, in either mode, is a NotImplementedError of this sentence."""
    return jax.tree.map(_same(sentence), tree)


def without_derivative(where: str, tree: Any) -> Any:
    """The same arrays in a rule of a layer's own gradient: its derivative is the NotImplementedError."""
    return constant(SECOND_DERIVATIVE.format(where), tree)


@lru_cache(LAYERS)
def _same(sentence: str) -> Callable[[Array], Array]:
    """The identity with that rule.

    Where JAX cuts a body into a forward and a backward (a scan's, say) it forgets the rule of a custom_jvp and inlines
    it. A custom_vmap it passes on as it is, with what is in it.
    """

    @custom_jvp
    def guarded(x: Array) -> Array:
        return x

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(sentence)

    same = custom_vmap(guarded)

    @same.def_vmap
    def of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
        return same(x), True

    return same
