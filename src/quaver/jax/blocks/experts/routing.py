"""Which experts a token goes to, and how much each counts: `quaver.torch.route` for arrays of JAX."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from quaver.core.reference.experts import TINY, check_route
from quaver.jax.numerics.given import array

#: Below it softplus(z) is exp(z) in float32, and the derivative of its root is still a number.
FAR = -40.0


class Routing(NamedTuple):
    """What `route` decides for T tokens, E experts and k choices."""

    #: int32 [T, k], the best first.
    indices: Array
    #: [T, k], float32, or float64 of such logits; differentiable.
    weights: Array
    #: [T, E], of the weights' dtype: scores that add up to 1 for each token; differentiable.
    probabilities: Array
    #: [T, E], of the weights' dtype: what was given.
    logits: Array


def _root_of_softplus(z: Array) -> Array:
    near = jnp.sqrt(jax.nn.softplus(jnp.maximum(z, FAR)))
    return jnp.where(z < FAR, jnp.exp(z / 2), near)


#: Logits to scores, each of them monotone.
SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda z: jax.nn.softmax(z, -1),
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _root_of_softplus,
}

#: Logits to the logarithms of their scores.
LOG_SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda z: z,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrtsoftplus": lambda z: jnp.where(z < FAR, z, jnp.log(jax.nn.softplus(jnp.maximum(z, FAR)))) / 2,
}


def route(
    logits: Array,
    k: int,
    *,
    scores: str = "softmax",
    softmax_first: bool = False,
    groups: int | None = None,
    top_groups: int | None = None,
    best_of_group: int | None = None,
    bias: Array | None = None,
    scale: float = 1.0,
    normalize: bool | None = None,
) -> Routing:
    """Choose k of E experts for each token by their scores, and give each a weight.

    Args:
        logits: [T, E], floating; computed with in float32 or float64.
        k: experts a token.
        scores: a row of `SCORES`.
        softmax_first: take the softmax over all experts and then choose; False takes it over the chosen logits alone.
        groups, top_groups: into how many groups of E / groups experts, and how many of them a token may choose from.
        best_of_group: how many scores of a group are summed; None is k / top_groups, rounded down, at least 1.
        bias: [E], added to scores where experts are chosen and not where they are weighted; gets no gradient.
        scale: multiplies the weights.
        normalize: divide the chosen scores by their sum; None does of sigmoid and sqrtsoftplus where k is more than 1.
    Returns:
        Ties and NaN as in `quaver.torch.route`.
    Raises:
        ValueError: options that do not fit one another or the logits.
        TypeError: what is no array.
    Exact: the choice without bias and groups, that of `quaver.torch.route`. Bounded: scores, weights and their
        gradients, relative RMS 1e-6 of float64 in float32.
    """
    logits = array("route", "logits", logits)
    of_bias = None if bias is None else jnp.shape(bias)
    check_route(logits.shape, k, scores, softmax_first, groups, top_groups, best_of_group, of_bias, normalize)
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    late = scores == "softmax" and not softmax_first
    score = z if late else SCORES[scores](z)
    by = lax.stop_gradient(z if bias is None and groups is None else score)
    by = by if bias is None else by + lax.stop_gradient(array("route", "bias", bias)).astype(by.dtype)
    if groups is not None and top_groups is not None:
        by = _within_groups(by, groups, top_groups, best_of_group or max(1, k // top_groups))
    indices = best(by, k)
    chosen = jnp.take_along_axis(score, indices, 1)
    if late:
        chosen = jax.nn.softmax(chosen, -1)
    elif normalize or (normalize is None and scores != "softmax" and k > 1):
        chosen = chosen / (chosen.sum(-1, keepdims=True) + TINY)
    # From logarithms: at logits near -60 the sum of all scores is below any floor that a division could have.
    lowest = jnp.finfo(z.dtype).min / 2
    probabilities = jax.nn.softmax(jnp.maximum(LOG_SCORES[scores](z), lowest), -1)
    return Routing(indices, chosen if scale == 1.0 else chosen * scale, probabilities, z)


def best(x: Array, k: int) -> Array:
    """The places of the k largest of each row of x [T, E], int32 [T, k], in descending order.

    Of equal numbers the first comes first; NaN is more than infinity, and -0 equals 0. Exact: compared as float32.
    """
    narrow = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(narrow, jnp.int32)
    bits = jnp.where(bits == jnp.int32(-(1 << 31)), 0, bits)
    bits = jnp.where(jnp.isnan(narrow), jnp.int32(0x7FC00000), bits)
    # Negative numbers descend as their bits ascend.
    order = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.top_k(order, k)[1]


def _within_groups(by: Array, groups: int, top: int, count: int) -> Array:
    """[T, E] with -inf for the experts of all but the best groups."""
    each = by.reshape(by.shape[0], groups, -1)
    taken = best(lax.top_k(each, count)[0].sum(-1), top)
    keep = (taken[:, None, :] == jnp.arange(groups, dtype=taken.dtype)[None, :, None]).any(-1)
    return jnp.where(keep[:, :, None], each, -jnp.inf).reshape(by.shape)
