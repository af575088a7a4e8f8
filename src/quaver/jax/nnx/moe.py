"""Mixture of experts, and a linear layer with a kernel for each expert."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from quaver.jax.blocks.experts import (
    CALL,
    ExpertWeights,
    MoEOptions,
    check_options,
    expert_kernels,
    grouped_dense,
    mixture,
    routed,
    sigmoid_gate,
)
from quaver.jax.blocks.options import DenseOptions, PartOptions
from quaver.jax.nnx.dense import Parameters, fresh_state, label, of_part
from quaver.jax.nnx.mlp import MLP
from quaver.options import pick, takes


@dataclass
class GroupedDenseArguments(DenseOptions, Parameters):
    """Constructor arguments of `GroupedDense`; see there."""

    experts: int
    in_features: int
    features: int | Sequence[int]
    _: KW_ONLY
    kernel_axes: tuple[str | None, ...] = ()


class GroupedDense(nnx.Module):
    """A linear layer per expert for rows that are grouped by expert, with parameters `kernel` and `bias`.

    Args:
        experts: number of experts.
        in_features, features: sizes of input and output; several features make several axes.
        kernel_axes: names of the kernel's axes, mesh or logical names, for NNX's eager sharding; empty for none.
        others: those of DenseGeneral. Initializers see each expert's kernel as a matrix.
    Exact and bounded: as `quaver.jax.grouped_dot`.
    """

    @takes(GroupedDenseArguments)
    def __init__(self, options: GroupedDenseArguments) -> None:
        experts, inputs, features = options.experts, options.in_features, options.features
        columns = (features,) if isinstance(features, int) else tuple(features)
        width, axes, dtype = math.prod(columns), options.kernel_axes, options.param_dtype
        draw = options.rngs.params
        kernels = jax.vmap(lambda key: options.kernel_init(key, (inputs, width), dtype))
        kernel = kernels(jax.random.split(draw(), experts)).reshape(experts, inputs, *columns)
        self.kernel = nnx.Param(kernel, **_metadata(axes, options.kernel_metadata))
        self.bias = nnx.data(None)
        if options.use_bias:
            biases = jax.vmap(lambda key: options.bias_init(key, (width,), dtype))
            bias = biases(jax.random.split(draw(), experts)).reshape(experts, *columns)
            self.bias = nnx.Param(bias, **_metadata(axes[:1] + axes[2:], options.bias_metadata))
        self.ndim = 2 + len(columns)
        self.dtype = options.dtype
        self.recipe = options.recipe
        self.seed = options.seed
        self.name = options.name
        self.state = fresh_state(options.recipe, options.uses)

    def __call__(self, x: Array, group_sizes: Array) -> Array:
        """Return [T, *features] of rows [T, in]; group_sizes, int32 [experts], counts the rows of each expert."""
        return grouped_dense(x, group_sizes, self.weights(), **self.how())

    def weights(self) -> ExpertWeights:
        """Return the arrays of the layer."""
        bias = None if self.bias is None else self.bias[...]
        return ExpertWeights(self.kernel[...], bias, self.state.read(self.recipe, label(self)))

    def how(self) -> dict[str, Any]:
        """Return the arguments of `grouped_dense` beside the arrays."""
        return {"recipe": self.recipe, "dtype": self.dtype, "name": self.name, "seed": self.seed}


def _metadata(axes: tuple[str | None, ...], more: Any) -> dict[str, Any]:
    return ({"out_sharding": axes} if axes else {}) | dict(more or {})


class BalanceBias(nnx.Variable):
    """Variable for the bias of a router that balances the load; it has no gradient."""


@dataclass
class MoEArguments(MoEOptions, Parameters):
    """Constructor arguments of `MoE`; see there."""

    in_features: int
    hidden: int
    experts: int
    k: int
    _: KW_ONLY


class MoE(nnx.Module):
    """Mixture of experts with a router and an optional shared expert.

    Submodules: `wi` and `wo`, GroupedDense; `shared`, an MLP. Parameters: `router` [d, experts], and optionally
    `router_bias` [experts] and `shared_gate` [d, 1], in high precision under every recipe. `balance`, a `BalanceBias`
    [experts], is updated by `quaver.jax.blocks.experts.update_bias`.

    Args:
        in_features, hidden: features of the input, and hidden features of each expert.
        experts, k: number of experts, and of experts per token.
        partition: name the kernels' axes "expert", "embed" and "mlp", for nnx.logical_axis_rules.
        expert_axis: mesh axis over which experts and tokens are spread; see `quaver.jax.blocks.experts.mixture`.
        others: those of `MoEOptions`, and of DenseGeneral except axis, kernel_axes and bias_axes.

    A call returns the output, or with `return_routing` (output, `Routing`), for `balance_loss` and `z_loss`.
    """

    @takes(MoEArguments)
    def __init__(self, options: MoEArguments) -> None:
        check_options(options)
        dim, draw, dtype = options.in_features, options.rngs.params, options.param_dtype
        self.experts, self.k = options.experts, options.k
        self.return_routing = options.return_routing
        for name in CALL:
            setattr(self, name, getattr(options, name))
        self.activation_options = tuple((options.activation_options or {}).items())
        self.router = nnx.Param(options.kernel_init(draw(), (dim, options.experts), dtype))
        self.router_bias, self.balance = nnx.data(None), nnx.data(None)
        self.shared, self.shared_gate = nnx.data(None), nnx.data(None)
        if options.router_bias:
            self.router_bias = nnx.Param(options.bias_init(draw(), (options.experts,), dtype))
        if options.balance_bias:
            self.balance = BalanceBias(jnp.zeros(options.experts, jnp.float32))
        layers = {}
        for name, (shape, axes) in expert_kernels(options, dim).items():
            own = pick(DenseOptions, options) | of_part(options, name)
            own |= {"kernel_axes": axes} if options.partition else {}
            layers[name] = GroupedDense(shape[0], shape[1], shape[2:], **own)
        self.wi, self.wo = layers["wi"], layers["wo"]
        if options.shared:
            own = pick(PartOptions, options) | of_part(options, "shared")
            self.shared = MLP(dim, options.shared, activation=options.activation, **own)
        if options.shared_gate:
            self.shared_gate = nnx.Param(options.kernel_init(draw(), (dim, 1), dtype))

    def __call__(self, x: Array) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        bias = None if self.router_bias is None else self.router_bias[...]
        balance = None if self.balance is None else self.balance[...]
        routing = routed(tokens, self.router[...], bias, balance, self)
        how = self.wi.how(), self.wo.how()
        y = mixture(tokens, routing, self.wi.weights(), self.wo.weights(), self, how)
        if self.shared is not None:
            z = self.shared(tokens)
            if self.shared_gate is not None:
                z = z * sigmoid_gate(tokens, self.shared_gate[...]).astype(z.dtype)
            y = y + z
        y = y.reshape(x.shape)
        return (y, routing) if self.return_routing else y
