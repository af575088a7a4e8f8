"""The learner interface of the training loop under JAX, with AdamW."""

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.state import buffers
from quaver.recipes.conversion import ConversionReport
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown
from quaver.train.config import TrainConfig
from quaver.train.jax import exchange
from quaver.train.jax.decoder import Decoder, Params, State, loss_of
from quaver.train.learner import Tensors
from quaver.train.memory import initial_values, parameters, projections
from quaver.train.model_config import MODELS

# ---- device ----


def find_device(name: str, threads: int = 0) -> jax.Device:
    """Return the JAX device of a name: cpu, cuda, cuda:1; auto is JAX's default.

    Args:
        name: name of the device.
        threads: CPU threads, 0 for one; has no effect if the process has used JAX before.
    Raises: ValueError if this machine has no such device.
    """
    # XLA reads the size of its CPU thread pool once, when JAX first looks for devices.
    os.environ.setdefault("NPROC", str(threads or 1))
    if name == "auto":
        return jax.devices()[0]
    platform, colon, number = name.partition(":")
    try:
        if colon and not (number.isascii() and number.isdigit()):
            raise ValueError(f"{number!r} is not a number")
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
        raise ValueError(
            f"the device {shown(name)} is not available to JAX, which has {known}; try --device cpu"
        ) from error


# ---- optimizer ----
# AdamW with the numbers of torch.optim, weight decay on matrices only, and gradient clipping by norm.

#: torch's default epsilon, and the epsilon that torch adds to the norm when clipping.
EPS, CLIP_EPS = 1e-8, 1e-6


class Rates(NamedTuple):
    """Scalars of one update, computed in float64 like torch."""

    # Learning rate divided by the first moment's bias correction.
    step: float
    # Factor of a matrix from weight decay: 1 - learning rate × weight decay.
    keep: float
    # Square root of the second moment's bias correction.
    root: float
    # Weight of the new gradient in the moments: 1 - beta.
    first: float
    second: float
    # Maximum norm of the gradient; infinite for no clipping.
    clip: float


def rates(lr: float, update: int, config: TrainConfig) -> Rates:
    """Return the scalars of an update, counted from 1."""
    return Rates(
        step=lr / (1 - config.beta1**update),
        keep=1 - lr * config.weight_decay,
        root=math.sqrt(1 - config.beta2**update),
        first=1 - config.beta1,
        second=1 - config.beta2,
        clip=config.clip or math.inf,
    )


class Moments(NamedTuple):
    """Moving averages of the gradient and its square."""

    first: Params
    second: Params


def zero_moments(params: Params) -> Moments:
    """Return zero moments."""
    return Moments(*({name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2)))


def norm_of(grads: Params) -> Array:
    """Return the total norm of all gradients."""
    return jnp.sqrt(jnp.stack([jnp.square(g).sum() for g in grads.values()]).sum())


def adamw(
    params: Params, moments: Moments, grads: Params, norm: Array, rates: Rates
) -> tuple[dict[str, Array], Moments]:
    """Apply one AdamW update with clipped gradients; returns new parameters and moments.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, in the order of torch.optim.AdamW's operations.
    """
    factor = jnp.minimum(rates.clip / (norm + CLIP_EPS), 1.0)
    new: dict[str, Array] = {}
    first: dict[str, Array] = {}
    second: dict[str, Array] = {}
    for name, p in params.items():
        g = grads[name] * factor
        first[name] = m = moments.first[name] + rates.first * (g - moments.first[name])
        second[name] = v = moments.second[name] + rates.second * (jnp.square(g) - moments.second[name])
        decayed = p * rates.keep if p.ndim >= 2 else p
        new[name] = decayed - rates.step * m / (jnp.sqrt(v) / rates.root + EPS)
    return new, Moments(first, second)


# ---- steps ----
# Compiled functions: one update, one loss, and the search for NaN after a failure.


def gradients(model: Decoder, params: Params, state: State, batch: Array) -> tuple[Array, Params, State]:
    """Return mean loss and gradient over micro-batches [accumulate, B, S + 1], and the recipe state after them.

    The gradient with respect to the recipe state is its next value; each micro-batch starts from that of the previous
    one.
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
    """Run one step: returns loss, gradient norm and new arrays; the old arrays if either number is not finite."""
    loss, grads, next_state = gradients(model, params, state, batch)
    norm = norm_of(grads)
    after = *adamw(params, moments, grads, norm, rates), next_state
    fine = jnp.isfinite(loss) & jnp.isfinite(norm)
    new_state = jax.tree.map(lambda new, old: lax.select(fine, new, old), after, (params, moments, state))
    return loss, norm, *new_state


#: Loss of one batch, without recording state.
evaluate = jax.jit(loss_of, static_argnums=0, static_argnames="look")


@partial(jax.jit, static_argnames="model")
def finite_gradients(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, Array]:
    """Return True for each parameter whose gradient is finite."""
    return finite_parameters(gradients(model, params, state, batch)[1])


def finite_outputs(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, bool]:
    """Return True for each module whose output is finite, in order of computation."""
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


def finite_parameters(params: Params) -> dict[str, Array]:
    return {name: jnp.isfinite(p).all() for name, p in params.items()}


# ---- learner ----


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder with its arrays."""

    decoder: Decoder
    params: Params
    # Recipe state by layer; empty if the recipe has none.
    state: State


class JaxLearner:
    """Learner with the arrays of a decoder and of AdamW."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocab: int) -> None:
        self.device = find_device(config.device, config.threads)
        self.config = config
        sizes = MODELS[config.model]
        self.shapes = parameters(sizes, vocab)
        self.decoder = Decoder(
            config=sizes, recipe=recipe, dtype=config.dtype, seed=config.seed, recompute=config.recompute
        )
        self._prepare(recipe)
        self.params = self._put(dict(initial_values(sizes, vocab, config.seed)))
        self.moments = zero_moments(self.params)
        self.updates = 0

    @property
    def extra_metrics(self) -> dict[str, float]:
        return {}

    @property
    def model(self) -> DecoderModel:
        return DecoderModel(decoder=self.decoder, params=self.params, state=self.state)

    def _prepare(self, recipe: Recipe) -> None:
        """Initialize state and report for a recipe."""
        sizes = MODELS[self.config.model]
        layers = projections(sizes)
        self.fresh = {name: own for name in layers if (own := buffers.init(recipe))}
        skipped = {} if sizes.tied else {"head": "as the embedding, it stays in high precision"}
        self.conversion = ConversionReport(converted=dict.fromkeys(layers, recipe), skipped=skipped)
        self.state = self._put(self.fresh)

    def change_recipe(self, recipe: Recipe) -> None:
        if recipe is not self.decoder.recipe:
            self.decoder = replace(self.decoder, recipe=recipe)
            self._prepare(recipe)

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        now = rates(lr, self.updates + 1, self.config)
        loss, norm, self.params, self.moments, self.state = update(
            self.decoder, self.params, self.moments, self.state, self._put(batch.astype(np.int32)), now
        )
        numbers = float(loss), float(norm)
        self.updates += all(map(math.isfinite, numbers))
        return numbers

    def loss(self, batches: np.ndarray) -> float:
        ids = self._put(batches.astype(np.int32))
        losses = [float(evaluate(self.decoder, self.params, self.state, batch)) for batch in ids]
        return sum(losses) / len(losses)

    def first_output(self, batch: np.ndarray) -> str:
        for name, known in finite_parameters(self.params).items():
            if not known:
                return f"the parameter {name} is already not finite"
        for micro_batch in self._put(batch.astype(np.int32)):
            for name, fine in finite_outputs(self.decoder, self.params, self.state, micro_batch).items():
                if not fine:
                    return f"the first output that is not finite is that of {name}"
        return "every module's output is finite"

    def first_gradient(self, batch: np.ndarray) -> str:
        ids = self._put(batch.astype(np.int32))
        fine = finite_gradients(self.decoder, self.params, self.state, ids)
        names = [name for name in self.shapes if not fine[name]]
        return f"the first gradient that is not finite is that of {names[-1]}" if names else "the norm overflowed"

    def tensors(self) -> tuple[Tensors, Tensors]:
        params, state, (first, second) = jax.device_get((self.params, self.state, self.moments))
        return {**params, **exchange.write_state(state)}, exchange.write_moments(first, second, self.updates)

    def names(self) -> set[str]:
        return set(self.tensors()[0])

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        params = exchange.weights(model, self.shapes)
        first, second, updates = exchange.read_moments(optimizer, self.shapes)
        self.state = self._put(exchange.read_state(model, self.fresh, self.decoder.recipe))
        self.params, self.updates = self._put(params), updates
        self.moments = Moments(self._put(first), self._put(second))

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self.device)
