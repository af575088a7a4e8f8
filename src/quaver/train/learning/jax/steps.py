"""The compiled functions of a run: one update, one loss, and the search for NaN after a failure."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from quaver.train.learning.jax.decoder import Decoder, Params, State, loss_of
from quaver.train.learning.jax.optimizer import Moments, Rates, adamw, norm_of


def gradients(model: Decoder, params: Params, state: State, batch: Array) -> tuple[Array, Params, State]:
    """Mean loss and gradient over micro-batches [accumulate, B, S + 1], and the state after them.

    The gradient of a recipe's state is its next value; each micro-batch starts from the one before it left.
    """
    differentiate = jax.value_and_grad(partial(loss_of, model), argnums=(0, 1))
    if len(batch) == 1:
        loss, (grads, state) = differentiate(params, state, batch[0])
        return loss, grads, state

    def add(carry: tuple[Array, Params, State], micro_batch: Array) -> tuple[tuple[Array, Params, State], None]:
        total, sums, state = carry
        loss, (grads, state) = differentiate(params, state, micro_batch)
        return (total + loss, jax.tree.map(jnp.add, sums, grads), state), None

    nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params), state
    (total, sums, state), _ = lax.scan(add, nothing, batch)
    return total / len(batch), jax.tree.map(lambda g: g / len(batch), sums), state


@partial(jax.jit, static_argnames="model", donate_argnames=("params", "moments", "state"))
def update(
    model: Decoder, params: Params, moments: Moments, state: State, batch: Array, rates: Rates
) -> tuple[Array, Array, Params, Moments, State]:
    """One step: the loss, the gradient's norm and the next arrays; the old arrays if either number is not finite."""
    loss, grads, next_state = gradients(model, params, state, batch)
    norm = norm_of(grads)
    after = *adamw(params, moments, grads, norm, rates), next_state
    fine = jnp.isfinite(loss) & jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: lax.select(fine, new, old), after, (params, moments, state))
    return loss, norm, *kept


#: Loss of one batch, nothing recorded.
evaluate = jax.jit(loss_of, static_argnums=0, static_argnames="look")


@partial(jax.jit, static_argnames="model")
def finite_gradients(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, Array]:
    """True for each parameter whose gradient is finite."""
    return finite(gradients(model, params, state, batch)[1])


def finite_outputs(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, bool]:
    """True for each part of the model whose output is finite, in order of computation."""
    names: list[str] = []

    @jax.jit
    def look(params: Params, state: State, batch: Array) -> list[Array]:
        flags: list[Array] = []

        def note(name: str, x: Array) -> None:
            names.append(name)
            flags.append(jnp.isfinite(x).all())

        loss_of(model, params, state, batch, note)
        return flags

    flags = look(params, state, batch)
    return {name: bool(flag) for name, flag in zip(names, flags, strict=True)}


def finite(params: Params) -> dict[str, Array]:
    return {name: jnp.isfinite(p).all() for name, p in params.items()}
