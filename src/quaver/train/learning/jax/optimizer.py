"""AdamW as torch.optim computes it, weight decay on matrices only, and clipping by the gradient's norm."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.jax.decoder import Params

#: torch's default, and what torch adds to the norm that a gradient is clipped by.
EPS, CLIP_EPS = 1e-8, 1e-6


class Rates(NamedTuple):
    """The numbers of one update, computed in float64 as torch computes them."""

    # The learning rate over the first moment's bias correction.
    step: float
    # What remains of a matrix after its decay: 1 - the learning rate times the weight decay.
    keep: float
    # The square root of the second moment's bias correction.
    root: float
    # Shares of the new gradient in the moments: 1 - beta.
    first: float
    second: float
    # Largest norm of the gradient; infinite for no clipping.
    clip: float


def rates(lr: float, update: int, config: TrainConfig) -> Rates:
    """The rates of the update with this number, counted from 1."""
    return Rates(
        step=lr / (1 - config.beta1**update),
        keep=1 - lr * config.weight_decay,
        root=math.sqrt(1 - config.beta2**update),
        first=1 - config.beta1,
        second=1 - config.beta2,
        clip=config.clip or math.inf,
    )


class Moments(NamedTuple):
    """Running means of the gradient and of its square."""

    first: Params
    second: Params


def start(params: Params) -> Moments:
    """Moments before the first update."""
    return Moments(*({name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2)))


def norm_of(grads: Params) -> Array:
    """The norm of all gradients together."""
    return jnp.sqrt(jnp.stack([jnp.square(g).sum() for g in grads.values()]).sum())


def adamw(
    params: Params, moments: Moments, grads: Params, norm: Array, rates: Rates
) -> tuple[dict[str, Array], Moments]:
    """Parameters and moments after one update with the gradients, clipped.

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
        kept = p * rates.keep if p.ndim >= 2 else p
        new[name] = kept - rates.step * m / (jnp.sqrt(v) / rates.root + EPS)
    return new, Moments(first, second)
