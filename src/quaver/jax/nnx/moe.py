"""Mixture of experts for NNX: grouped linear layers of all experts, and the layer that routes tokens to them."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from quaver.jax.blocks.layers import matrices
from quaver.jax.blocks.mixture import gated, mixture
from quaver.jax.blocks.moe import Routing
from quaver.jax.blocks.options import KernelOptions, MixtureOptions, check_mixture
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.linears.grouped import grouped_dot
from quaver.jax.nnx.dense import Parameters, fresh_state, label, of_part, parameter_metadata
from quaver.jax.nnx.mlp import MLP
from quaver.options import pick, takes


@dataclass
class GroupedArguments(KernelOptions, Parameters):
    """Constructor arguments of `GroupedDense`; see there."""

    experts: int
    in_features: int
    features: tuple[int, ...]
    _: KW_ONLY
    kernel_axes: tuple[str | None, ...] = ()


class GroupedDense(nnx.Module):
    """A linear layer per expert, with a parameter `kernel` [experts, K, *features]; no bias.

    Args:
        experts, in_features: number of experts, and K.
        features: output features; several make several axes.
        kernel_axes: names of the kernel's axes, for NNX's sharding; empty for none.
        others: those of DenseGeneral. All experts share one state.
    """

    @takes(GroupedArguments)
    def __init__(self, options: GroupedArguments) -> None:
        shape = options.experts, options.in_features, math.prod(options.features)
        # A matrix per expert, so that fan-in is correct.
        kernel = options.kernel_init(options.rngs.params(), shape, options.param_dtype)
        metadata = parameter_metadata(options.kernel_axes, options.kernel_metadata)
        self.kernel = nnx.Param(kernel.reshape(*shape[:2], *options.features), **metadata)
        self.dtype, self.recipe, self.seed, self.name = options.dtype, options.recipe, options.seed, options.name
        self.state = fresh_state(options.recipe, options.uses)

    def __call__(self, rows: Array, group_sizes: Array) -> Array:
        """Return [R, *features] of rows [R, K], where the first group_sizes[0] rows belong to expert 0, and so on."""
        kernel = self.kernel[...]
        y = grouped_dot(
            rows,
            kernel.reshape(*kernel.shape[:2], -1),
            group_sizes,
            recipe=self.recipe,
            state=self.state.read(self.recipe, label(self)),
            dtype=self.dtype,
            name=self.name or "grouped",
            seed=self.seed,
        )
        return y.reshape(-1, *kernel.shape[2:])


@dataclass
class MoEArguments(MixtureOptions, KernelOptions, Parameters):
    """Constructor arguments of `MoE`; see there."""

    in_features: int
    hidden: int
    _: KW_ONLY
    activation: str = "swiglu"
    partition: bool = False


class MoE(nnx.Module):
    """Mixture of experts: a router in float32, an MLP per expert, and an optional shared MLP for all tokens.

    Args:
        in_features, hidden: features of input and output, and hidden features of each expert.
        experts, k: number of experts, and number of experts per token.
        partition: name the kernels' axes "expert", "embed" and "mlp", for nnx.logical_axis_rules.
        others: those of `MixtureOptions` and of DenseGeneral; no layer has a bias. Parameters are `router`
            [D, experts], `router_bias` and `shared_gate` [D, 1]; submodules are `wi` and `wo` (`GroupedDense`) and
            `shared` (`MLP`). The balancing bias is `balance`, a Variable that is no parameter.
    """

    @takes(MoEArguments)
    def __init__(self, options: MoEArguments) -> None:
        check_mixture(options)
        self.options = nnx.static(MixtureOptions(**pick(MixtureOptions, options)))
        self.activation = options.activation
        features, draw = options.in_features, options.rngs.params
        dtype = options.param_dtype
        self.router = nnx.Param(options.kernel_init(draw(), (features, options.experts), dtype))
        self.router_bias = nnx.data(nnx.Param(jnp.zeros(options.experts, dtype)) if options.router_bias else None)
        balance = nnx.Variable(jnp.zeros(options.experts, jnp.float32)) if options.balance_bias else None
        self.balance = nnx.data(balance)
        both = matrices(options.activation, options.hidden, features)
        self.wi = self._layer(options, "wi", features, both["wi"])
        self.wo = self._layer(options, "wo", options.hidden, both["wo"])
        mlp = gate = None
        if options.shared:
            own = pick(KernelOptions, options) | of_part(options, "shared")
            mlp = MLP(
                features,
                options.shared,
                activation=options.activation,
                use_bias=False,
                partition=options.partition,
                **own,
            )
        if options.shared_gate:
            gate = nnx.Param(options.kernel_init(draw(), (features, 1), dtype))
        self.shared, self.shared_gate = nnx.data(mlp), nnx.data(gate)

    def __call__(self, x: Array) -> Array | tuple[Array, Routing]:
        """Return [..., D] of x [..., D]; with `return_routing` also the `Routing` of all tokens."""
        bias, balance = (None if v is None else v[...] for v in (self.router_bias, self.balance))
        router = self.router[...], bias, balance
        y, routing = mixture(x, self.options, self.activation, router, (self.wi, self.wo), self._shared_mlp())
        return (y, routing) if self.options.return_routing else y

    def _layer(self, options: MoEArguments, name: str, inputs: int, matrix: KernelMatrix) -> GroupedDense:
        own = pick(KernelOptions, options) | of_part(options, name)
        axes = ("expert", *matrix.axes) if options.partition else ()
        return GroupedDense(options.experts, inputs, matrix.features, kernel_axes=axes, **own)

    def _shared_mlp(self) -> Callable[[Array], Array] | None:
        """Return the function of the shared MLP, or None."""
        mlp, gate = self.shared, self.shared_gate
        if mlp is None or gate is None:
            return mlp
        return lambda tokens: gated(mlp(tokens), tokens, gate[...])
