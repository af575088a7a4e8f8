"""What JAX may ask of a quantized layer's derivative, and what is refused with a sentence.

A forward rule is told which of its arguments are differentiated. A quantized layer has one derivative, written by hand;
rounding has none that a second one could follow, and the programs that round would pass for constants in places.
"""

from typing import Any

import jax

from quaver.jax.linears.gemms import Call
from quaver.jax.numerics.constants import without_derivative
from quaver.jax.numerics.quantized import Quantized
from quaver.jax.state.buffers import State


def unwrapped(*parts: Any) -> tuple[list[Any], list[bool]]:
    """A forward rule's arguments as plain arrays, and which of them are differentiated."""
    perturbed = [any(p.perturbed for p in jax.tree.leaves(part, is_leaf=_is_primal)) for part in parts]
    return [jax.tree.map(lambda p: p.value, part, is_leaf=_is_primal) for part in parts], perturbed


def _is_primal(node: Any) -> bool:
    return hasattr(node, "perturbed")


def differentiated_once(call: Call, x: Any, w: Any, bias: Any, state: State, perturbed: list[bool]) -> Any:
    """x, w, bias and state in a forward rule, if their gradients may be asked for as they are.

    Args:
        perturbed: whose gradients are.
    Raises:
        ValueError: the gradient of an operand that was given quantized, or one that leaves out the state, or adds up
            several.
        NotImplementedError: later, where what is returned is differentiated.
    """
    for what, operand, asked in (("x", x, perturbed[0]), ("w", w, perturbed[1])):
        if asked and isinstance(operand, Quantized):
            raise ValueError(
                f"{call.where}: the gradient of {what} is asked for, and {what} is a Quantized, whose codes have none; "
                f"give {what} as an array, or differentiate with respect to the other arguments alone"
            )
    if call.recipe.stochastic:
        _refuse_repeated_noise(call, state, perturbed)
    if call.recipe.delayed is not None or call.recipe.stochastic:
        _refuse_forgotten(call, perturbed)
    return without_derivative(call.where, (x, w, bias, state))


#: How Flax's modules, which have the state, are differentiated.
FLAX = (
    "In Flax NNX call quaver.jax.nnx.value_and_grad(loss)(model, ...) instead of nnx.value_and_grad; in Flax Linen "
    "differentiate with respect to all variables, as TrainState.create(params=variables, ...).apply_gradients takes "
    "them."
)


def _refuse_repeated_noise(call: Call, state: State, perturbed: list[bool]) -> None:
    if "count" not in state:
        raise ValueError(
            f"{call.where}: recipe {call.recipe.name!r} rounds gradients at random and got no state, so every step "
            "would draw the same noise; pass state=quaver.jax.state.init(recipe) and differentiate with respect to it, "
            f"or take the recipe with stochastic_rounding=False. {FLAX}"
        )
    if not any(perturbed[1:]):
        raise ValueError(
            f"{call.where}: the gradient of x alone is taken under recipe {call.recipe.name!r}, which rounds at random "
            "and counts its noise in the state, so every step would draw the same; differentiate with respect to x and "
            "the state, jax.grad(loss, argnums=(0, 1))(x, state), whose gradient is its next value, or take the recipe "
            "with stochastic_rounding=False"
        )


def _refuse_forgotten(call: Call, perturbed: list[bool]) -> None:
    trains = perturbed[1] or perturbed[2]
    if trains and not perturbed[3]:
        raise ValueError(
            f"{call.where}: gradients are taken under recipe {call.recipe.name!r}, but not with respect to the layer's "
            "state, so the next step would know nothing of this one; differentiate with respect to both, "
            "jax.value_and_grad(loss, argnums=(0, 1))(parameters, state): the state's gradient is its next value. "
            f"{FLAX} If the layer is to stay as it is, put jax.lax.stop_gradient around its weights, its bias and its "
            "state: the gradient of x alone reads a history and leaves it alone"
        )
    if perturbed[3] and call.uses.count > 1:
        raise ValueError(
            f"{call.where}: {call.uses.count} calls read the same state in one step, and autodiff would add up what "
            f"they return for it; give each a slice of quaver.jax.state.share(state, {call.uses.count}). If only one "
            "of them runs, as of branches of jax.lax.cond, hand the state to the branches as an operand; a call that "
            "is only to read it takes jax.lax.stop_gradient of its weights, its bias and its state"
        )
