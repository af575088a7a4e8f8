"""Mixture of experts as a function that the linen and NNX modules share, its losses, and the bias that balances it.

y = Σ over the k experts e that a token is routed to of weight · expert[e](x)  +  shared(x)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.blocks.layers import activate_fused
from quaver.jax.blocks.moe import Routing, permute, route, unpermute
from quaver.jax.blocks.options import MixtureOptions
from quaver.reference.moe import capacity_of

#: A grouped linear layer: rows [R, K], int32 [experts] to [R, *features].
Grouped = Callable[[Array, Array], Array]


def mixture(
    x: Array,
    options: MixtureOptions,
    activation: str,
    router: tuple[Array, Array | None, Array | None],
    experts: tuple[Grouped, Grouped],
    shared: Callable[[Array], Array] | None,
) -> tuple[Array, Routing]:
    """Return the output [..., D] of a mixture of experts, and the routing of all tokens.

    Args:
        x: [..., D].
        options: routing and capacity.
        activation: a name in `quaver.jax.blocks.layers.ACTIVATIONS`.
        router: kernel [D, experts], bias [experts] or None, and balancing bias [experts] or None.
        experts: first and second linear layer of the experts.
        shared: function of all tokens that is added, or None.
    """
    tokens = x.reshape(-1, x.shape[-1])
    kernel, bias, balance = router
    # In float32 under every recipe: a router decides between experts by small differences.
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = jnp.dot(tokens.astype(wide), kernel.astype(wide), precision=jax.lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(wide)
    routing = route(
        logits,
        options.k,
        scores=options.scores,
        softmax_first=options.softmax_first,
        groups=options.groups,
        top_groups=options.top_groups,
        best_of_group=options.best_of_group,
        bias=balance,
        scale=options.scale,
        normalize=options.normalize,
    )
    capacity = capacity_of(options.capacity, tokens.shape[0], options.k, options.experts)
    rows, sizes, places = permute(tokens, routing.indices, options.experts, capacity=capacity)
    first, second = experts
    h = first(rows, sizes)
    y = unpermute(second(activate_fused(activation, h, h.ndim - 1), sizes), places, options.k, routing.weights)
    y = y if shared is None else y + shared(tokens)
    return y.reshape(x.shape), routing


def gated(y: Array, tokens: Array, gate: Array) -> Array:
    """Multiply outputs [T, D] by a sigmoid of a linear function of each token, with the kernel `gate` [D, 1]."""
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = jnp.dot(tokens.astype(wide), gate.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return y * jax.nn.sigmoid(logits).astype(y.dtype)


def token_counts(indices: Array, experts: int, mask: Array | None = None) -> Array:
    """Count how often each expert was chosen: int32 [experts]. Exact.

    Args:
        indices: [T, k].
        experts: number of experts.
        mask: bool [T], False for tokens to ignore, such as padding.
    """
    ones = jnp.ones_like(indices) if mask is None else jnp.broadcast_to(mask[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(experts, jnp.int32).at[indices.reshape(-1)].add(ones.reshape(-1).astype(jnp.int32))


def balance_loss(
    routing: Routing, *, sequences: int = 1, mask: Array | None = None, counts: Array | None = None
) -> Array:
    """Load-balancing loss: experts × the sum over experts of (share of choices) × (mean probability).

    It is 1 if all experts are equally loaded and equally probable. The share has no gradient.

    Args:
        routing: routing of T tokens.
        sequences: number of consecutive groups of T / sequences tokens whose losses are averaged.
        mask: bool [T], False for tokens to ignore, such as padding.
        counts: [experts], choices of more tokens than these, such as a sum over devices. Requires sequences=1.
    Raises:
        ValueError: sequences that do not divide the tokens, or a mask or counts of another shape.
    Source: as `quaver.torch.balance_loss`.
    """
    probabilities = routing.probabilities
    (tokens, k), experts = routing.indices.shape, probabilities.shape[1]
    _check(tokens, sequences, mask)
    if counts is not None and (sequences != 1 or counts.shape != (experts,)):
        raise ValueError(f"counts apply to the whole batch: give [{experts}] with sequences=1, not {counts.shape}")
    each = tokens // sequences
    taken = jnp.ones(tokens, probabilities.dtype) if mask is None else mask.astype(probabilities.dtype)
    probabilities = probabilities if mask is None else jnp.where(mask[:, None], probabilities, 0)
    if counts is None:
        ones = jnp.broadcast_to(taken[:, None], (tokens, k)).reshape(sequences, each * k)
        choices = routing.indices.reshape(sequences, each * k)
        chosen = jax.vmap(lambda i, n: jnp.zeros(experts, n.dtype).at[i].add(n))(choices, ones)
    else:
        chosen = counts.astype(taken.dtype)[None]
    shares = jax.lax.stop_gradient(chosen / jnp.maximum(chosen.sum(1, keepdims=True), 1))
    size = jnp.maximum(taken.reshape(sequences, each).sum(1, keepdims=True), 1)
    means = probabilities.reshape(sequences, each, experts).sum(1) / size
    return experts * (shares * means).sum(1).mean()


def z_loss(routing: Routing, mask: Array | None = None) -> Array:
    """Router z-loss: the mean over tokens of log(sum of exp(logits))², which keeps logits small.

    Args:
        routing: routing of T tokens.
        mask: bool [T], False for tokens to ignore.
    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    logits = routing.logits
    _check(logits.shape[0], 1, mask)
    squares = jnp.square(jax.nn.logsumexp(logits, -1))
    if mask is None:
        return squares.sum() / max(1, logits.shape[0])
    return jnp.where(mask, squares, 0).sum() / jnp.maximum(mask.sum(), 1)


def updated_bias(bias: Array, counts: Array, rate: float = 1e-3) -> Array:
    """Return the balancing bias with `rate` added for experts that were chosen less than the mean, or subtracted.

    Args:
        bias: float32 [experts].
        counts: int32 [experts], from `token_counts`.
        rate: step size.
    Raises:
        ValueError: shapes that differ, or a bias in 16 bits, in which such steps vanish.
    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    if bias.shape != counts.shape or bias.ndim != 1:
        raise ValueError(f"bias and counts are of the same experts; these are {bias.shape} and {counts.shape}")
    if bias.dtype.itemsize < 4:
        raise ValueError(f"bias is {bias.dtype}, in which steps of {rate} vanish: use float32")
    return bias + rate * jnp.sign(counts.sum() - counts * counts.shape[0]).astype(bias.dtype)


def _check(tokens: int, sequences: int, mask: Array | None) -> None:
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{sequences} sequences do not divide {tokens} tokens: give the batch's number of sequences")
    if mask is not None and (mask.shape != (tokens,) or mask.dtype != jnp.bool_):
        raise ValueError(f"mask is bool [{tokens}], one a token; this one is {mask.dtype} {mask.shape}: flatten it")
