"""Mixture of experts: routing options, experts on one device or spread over a mesh axis, and balancing losses.

    y[t] = Σ_j weights[t, j] wo[e_j] activation(wi[e_j] x[t])          e_j: the experts of token t

Spread over a mesh axis of n devices, each has E / n experts and T / n tokens: rows go to the devices of their experts
and back by an all-to-all each. Every expert gets its rows in the order of one device, so that codes are equal wherever
blocks lie within a row or along an expert's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from quaver.jax.blocks.layers import activate_fused, hidden_features
from quaver.jax.blocks.moe import Routing, gather_rows, inverse, order, permute, route, unpermute
from quaver.jax.blocks.options import PartOptions
from quaver.jax.linears.grouped import grouped_dot
from quaver.reference.moe import capacity_of, check_mixture_extras, check_route

# ---- options ----


@dataclass(kw_only=True)
class MoEOptions(PartOptions):
    """Options of a mixture of experts; the routing ones are the arguments of `route`."""

    # Bias of experts and of the shared expert; the router has `router_bias`.
    use_bias: bool = False
    # Activation of the experts: a name in `quaver.jax.blocks.layers.ACTIVATIONS`.
    activation: str = "swiglu"
    activation_options: Mapping[str, float] | None = None
    scores: str = "softmax"
    softmax_first: bool = False
    groups: int | None = None
    top_groups: int | None = None
    best_of_group: int | None = None
    scale: float = 1.0
    normalize: bool | None = None
    # A bias parameter of the logits, as in gpt-oss.
    router_bias: bool = False
    # A bias [experts] that is added to scores for the choice, and has no gradient; see `update_bias`.
    balance_bias: bool = False
    # Hidden features of the shared MLP, 0 for none.
    shared: int = 0
    # Multiply the shared MLP's output by a sigmoid gate per token, as in Qwen2-MoE.
    shared_gate: bool = False
    # Capacity of an expert as a multiple of an even share of the choices, rounded up; None for no limit.
    capacity: float | None = None
    # Each expert's rows are padded with zeros to a multiple of it.
    pad: int = 1
    # Mesh axis over which experts and tokens are spread, or None.
    expert_axis: str | None = None
    # Return (output, `Routing`) instead of the output.
    return_routing: bool = False


#: Options that `route` takes, and those that a call reads besides the numbers of experts.
ROUTING = ("scores", "softmax_first", "groups", "top_groups", "best_of_group", "scale", "normalize")
CALL = (*ROUTING, "activation", "capacity", "pad", "expert_axis")


def check_options(options: Any) -> None:
    """Raise ValueError if options of a mixture do not fit each other."""
    arguments = options.groups, options.top_groups, options.best_of_group, None, options.normalize
    check_route((0, options.experts), options.k, options.scores, options.softmax_first, *arguments)
    check_mixture_extras(options.shared, options.shared_gate, options.capacity)


def expert_kernels(options: Any, dim: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Return shape and logical axis names of the kernels wi and wo of all experts."""
    features = hidden_features(options.activation, options.hidden)
    inner: tuple[str | None, ...] = ("mlp", None)[: len(features)]
    return {
        "wi": ((options.experts, dim, *features), ("expert", "embed", *inner)),
        "wo": ((options.experts, options.hidden, dim), ("expert", "mlp", "embed")),
    }


# ---- router ----


def routed(tokens: Array, kernel: Array, bias: Array | None, balance: Array | None, options: Any) -> Routing:
    """Route tokens [T, d] by the logits tokens @ kernel + bias, in float32 or float64 under every recipe.

    Args:
        tokens: [T, d].
        kernel: [d, experts].
        bias: [experts] or None.
        balance: [experts], added to the scores for the choice, or None.
        options: a module with `MoEOptions` and `k`.
    """
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    logits = jnp.matmul(tokens.astype(wide), kernel.astype(wide), precision=lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(wide)
    return route(logits, options.k, bias=balance, **{name: getattr(options, name) for name in ROUTING})


def sigmoid_gate(tokens: Array, kernel: Array) -> Array:
    """Return the sigmoid of tokens [T, d] @ kernel [d, 1], in float32 or float64."""
    wide = jnp.promote_types(tokens.dtype, jnp.float32)
    return jax.nn.sigmoid(jnp.matmul(tokens.astype(wide), kernel.astype(wide), precision=lax.Precision.HIGHEST))


# ---- experts ----


class ExpertWeights(NamedTuple):
    """Arrays of one grouped linear layer: experts along the first axis of kernel and bias."""

    #: [experts, in, *features].
    kernel: Array
    #: [experts, *features] or None.
    bias: Array | None
    #: State of its recipe, common to all experts.
    state: Any


def grouped_dense(x: Array, group_sizes: Array, weights: ExpertWeights, **how: Any) -> Array:
    """Multiply rows [T, in] that are grouped by expert with their experts' kernels, and add their biases.

    Args:
        x, group_sizes: as for `quaver.jax.grouped_dot`.
        weights: kernels, biases and state.
        how: recipe, dtype, name and seed, as for `quaver.jax.grouped_dot`.
    Returns:
        [T, *features].
    """
    experts, inputs, *features = weights.kernel.shape
    y = grouped_dot(x, weights.kernel.reshape(experts, inputs, -1), group_sizes, state=weights.state, **how)
    if weights.bias is not None:
        expert = jnp.repeat(jnp.arange(experts), group_sizes, total_repeat_length=x.shape[0])
        y = y + weights.bias.reshape(experts, -1).astype(y.dtype)[expert]
    return y.reshape(x.shape[0], *features)


def experts_on_rows(
    rows: Array, group_sizes: Array, wi: ExpertWeights, wo: ExpertWeights, options: Any, how: tuple[Any, Any]
) -> Array:
    """Apply each expert's MLP to its rows.

    Args:
        rows: [T, d], grouped by expert.
        group_sizes: int32 [experts].
        wi, wo: weights of both layers.
        options: a module with `MoEOptions`.
        how: further arguments of `grouped_dense` for both layers.
    """
    h = grouped_dense(rows, group_sizes, wi, **how[0])
    h = activate_fused(options.activation, h, wi.kernel.ndim - 2, **dict(options.activation_options or ()))
    return grouped_dense(h, group_sizes, wo, **how[1])


def mixture(
    tokens: Array, routing: Routing, wi: ExpertWeights, wo: ExpertWeights, options: Any, how: tuple[Any, Any]
) -> Array:
    """Apply the chosen experts to tokens [T, d] and sum their outputs; arguments as for `experts_on_rows`.

    With `expert_axis`, in a mesh that has this axis: the axis must divide T and the number of experts.
    """
    capacity = capacity_of(options.capacity, tokens.shape[0], options.k, options.experts)
    axis = options.expert_axis
    if axis is None:
        permuted = permute(tokens, routing.indices, options.experts, pad=options.pad, capacity=capacity)
        y = experts_on_rows(permuted.rows, permuted.group_sizes, wi, wo, options, how)
        return unpermute(y, permuted.places, options.k, routing.weights)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or axis not in mesh.shape:
        raise ValueError(
            f"expert_axis is {axis!r}, and the mesh has {tuple(mesh.shape) or 'no axes'}: call the model in "
            f"`with jax.set_mesh(mesh):` of a mesh with this axis, or make it with expert_axis=None"
        )
    devices = mesh.shape[axis]
    if tokens.shape[0] % devices or options.experts % devices:
        raise ValueError(
            f"{tokens.shape[0]} tokens and {options.experts} experts do not divide among the {devices} devices of mesh "
            f"axis {axis!r}; give numbers that do"
        )
    split, all_of = PartitionSpec(axis), PartitionSpec()
    arrays: Any = (split, None if wi.bias is None else split, all_of)
    run = partial(_exchanged, devices=devices, capacity=capacity, options=options, how=how)
    arrays = ExpertWeights(*arrays)
    spread = jax.shard_map(run, in_specs=(split, split, split, arrays, arrays), out_specs=split, axis_names={axis})
    return spread(tokens, routing.indices, routing.weights, wi, wo)


def _exchanged(
    tokens: Array,
    indices: Array,
    weights: Array,
    wi: ExpertWeights,
    wo: ExpertWeights,
    *,
    devices: int,
    capacity: int | None,
    options: Any,
    how: tuple[Any, Any],
) -> Array:
    """Apply experts that are spread over a mesh axis to this device's tokens, inside `jax.shard_map`."""
    (count, k), own = indices.shape, options.experts // devices
    # A choice beyond an expert's capacity among these tokens is beyond it among all, whose first come first.
    sizes, places, _ = order(indices, options.experts, 1, capacity)
    slots = count * k if capacity is None else min(count * k, own * capacity)
    first = (jnp.cumsum(sizes) - sizes)[::own]
    expert = indices.reshape(-1).astype(jnp.int32)
    places = jnp.where(places < 0, -1, places - first[expert // own] + expert // own * slots)
    sources = inverse(places, devices * slots)
    numbers = jnp.where(sources < 0, own, expert[sources] % own)
    exchange = partial(lax.all_to_all, axis_name=options.expert_axis, split_axis=0, concat_axis=0, tiled=True)
    received = exchange(gather_rows(k, tokens, sources, places))  # [devices * slots, d], by device
    permuted = permute(received, exchange(numbers)[:, None], own, pad=options.pad, capacity=capacity)
    y = experts_on_rows(permuted.rows, permuted.group_sizes, wi, wo, options, how)
    return unpermute(exchange(unpermute(y, permuted.places, 1)), places, k, weights)


# ---- load balancing: losses of a `Routing`, and a bias that replaces a loss ----


def token_counts(indices: Array, experts: int, mask: Array | None = None) -> Array:
    """Count how often each expert was chosen: int32 [experts].

    Args:
        indices: [T, k].
        experts: number of experts.
        mask: bool [T], False for tokens to ignore, such as padding.

    Exact.
    """
    ones = jnp.ones(indices.shape, jnp.int32)
    ones = ones if mask is None else ones * mask[:, None].astype(jnp.int32)
    return jnp.zeros(experts, jnp.int32).at[indices].add(ones)


def balance_loss(
    routing: Routing, *, sequences: int = 1, mask: Array | None = None, counts: Array | None = None
) -> Array:
    """Load-balancing loss: experts × the sum over experts of (share of choices) × (mean probability).

    It is 1 if all experts are equally loaded and equally probable. The share has no gradient.

    Args:
        routing: routing of T tokens.
        sequences: number of consecutive parts of T / sequences tokens whose losses are averaged.
        mask: bool [T], False for tokens to ignore.
        counts: [E], choices of more tokens than these; requires sequences=1.
    Returns:
        A differentiable scalar; 0 for no tokens.
    Raises:
        ValueError: sequences that do not divide the tokens, or a mask or counts of another shape.
    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4; DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
    """
    indices, probabilities = routing.indices, routing.probabilities
    (tokens, k), experts = indices.shape, probabilities.shape[1]
    _check(tokens, sequences, mask)
    if counts is not None and (sequences != 1 or counts.shape != (experts,)):
        raise ValueError(f"counts apply to the whole batch: give [{experts}] with sequences=1, not {counts.shape}")
    dtype = probabilities.dtype
    used = jnp.ones(tokens, dtype) if mask is None else mask.astype(dtype)
    if mask is not None:
        probabilities = jnp.where(mask[:, None], probabilities, 0)
    if counts is None:
        parts = indices.reshape(sequences, -1), jnp.repeat(used, k).reshape(sequences, -1)
        chosen = jax.vmap(lambda at, ones: jnp.zeros(experts, dtype).at[at].add(ones))(*parts)
    else:
        chosen = counts.astype(dtype)[None]
    shares = chosen / jnp.maximum(chosen.sum(1, keepdims=True), 1)
    size = jnp.maximum(used.reshape(sequences, -1).sum(1, keepdims=True), 1)
    means = probabilities.reshape(sequences, -1, experts).sum(1) / size
    return experts * (lax.stop_gradient(shares) * means).sum(1).mean()


def z_loss(routing: Routing, mask: Array | None = None) -> Array:
    """Router z-loss: the mean over tokens of log(sum of exp(logits))², which keeps logits small.

    Args:
        routing: routing of T tokens.
        mask: bool [T], False for tokens to ignore.
    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    tokens = routing.logits.shape[0]
    _check(tokens, 1, mask)
    squares = jnp.square(jax.nn.logsumexp(routing.logits, -1))
    if mask is None:
        return squares.sum() / max(1, tokens)
    return jnp.where(mask, squares, 0).sum() / jnp.maximum(mask.sum(), 1)


def update_bias(bias: Array, counts: Array, rate: float = 1e-3) -> Array:
    """Return the bias, higher by `rate` for experts with fewer choices than the mean, and lower for the others.

    Args:
        bias: float32 [E], as `route` takes it.
        counts: [E], choices of all tokens of a step, from `token_counts`.
        rate: step size.

    Exact. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    return bias + rate * jnp.sign(counts.sum() - counts * counts.shape[0]).astype(bias.dtype)


def _check(tokens: int, sequences: int, mask: Array | None) -> None:
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{sequences} sequences do not divide {tokens} tokens: give the batch's number of sequences")
    if mask is not None and (mask.shape != (tokens,) or mask.dtype != jnp.bool_):
        raise ValueError(f"mask is bool [{tokens}], one a token; this one is {mask.dtype} {mask.shape}: flatten it")
