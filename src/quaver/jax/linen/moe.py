"""Mixture of experts, and a linear layer with a kernel for each expert."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from quaver.jax.blocks.experts import (
    ExpertWeights,
    MoEOptions,
    balance_loss,
    check_options,
    expert_kernels,
    grouped_dense,
    mixture,
    routed,
    sigmoid_gate,
    z_loss,
)
from quaver.jax.blocks.options import DenseOptions, Initializer, PartOptions
from quaver.jax.linen.dense import layer_state, qualified_name
from quaver.jax.linen.mlp import MLP
from quaver.jax.numerics.quantized import array
from quaver.options import pick, suggests


@suggests
class GroupedDense(nn.Module, DenseOptions):
    """A linear layer per expert for rows that are grouped by expert, with parameters `kernel` and `bias`.

    Attributes:
        experts: number of experts.
        features: output features; several make several axes.
        kernel_axes: logical names of the kernel's axes, for flax's sharding rules; empty for none.
        others: those of DenseGeneral. Initializers see each expert's kernel as a matrix.
    Exact and bounded: as `quaver.jax.grouped_dot`.
    """

    experts: int
    features: int | Sequence[int]
    kernel_axes: tuple[str | None, ...] = field(default=(), kw_only=True)

    def __call__(self, x: Array, group_sizes: Array) -> Array:
        """Return [T, *features] of rows [T, in]; group_sizes, int32 [experts], counts the rows of each expert."""
        return grouped_dense(x, group_sizes, self.weights(x.shape[-1]), **self.how())

    @nn.compact
    def weights(self, in_features: int) -> ExpertWeights:
        """Return the arrays of the layer."""
        features = (self.features,) if isinstance(self.features, int) else tuple(self.features)
        shape, axes = (self.experts, in_features, *features), self.kernel_axes
        kernel = self.param("kernel", _per_expert(self.kernel_init, 1, axes), shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias_init = _per_expert(self.bias_init, 0, axes[:1] + axes[2:])
            bias = self.param("bias", bias_init, (self.experts, *features), self.param_dtype)
        return ExpertWeights(kernel, bias, layer_state(self, self.recipe, self.uses))

    def how(self) -> dict[str, Any]:
        """Return the arguments of `grouped_dense` beside the arrays."""
        return {"recipe": self.recipe, "dtype": self.dtype, "name": qualified_name(self), "seed": self.seed}


def _per_expert(init: Initializer, inputs: int, names: tuple[str | None, ...]) -> Initializer:
    """Return an initializer for [experts, *inputs, *features] that runs `init` on each expert's matrix or vector."""

    def initialize(key: Array, shape: Sequence[int], dtype: Any) -> Array:
        one = (*shape[1 : 1 + inputs], -1)
        width = jax.eval_shape(lambda: jnp.zeros(shape[1:]).reshape(one)).shape
        return jax.vmap(lambda key: init(key, width, dtype))(jax.random.split(key, shape[0])).reshape(shape)

    return nn.with_logical_partitioning(initialize, names) if names else initialize


@suggests
class MoE(nn.Module, MoEOptions):
    """Mixture of experts with a router and an optional shared expert.

    Submodules: `wi` and `wo`, GroupedDense; `shared`, an MLP. Parameters: `router` [d, experts], and optionally
    `router_bias` [experts] and `shared_gate` [d, 1], in high precision under every recipe. The collection "router" has
    the `balance` [experts] of `balance_bias`, which `quaver.jax.blocks.experts.update_bias` updates.

    Attributes:
        hidden: hidden features of each expert.
        experts, k: number of experts, and of experts per token.
        partition: name the kernels' axes "expert", "embed" and "mlp", for flax's logical sharding rules.
        expert_axis: mesh axis over which experts and tokens are spread; see `quaver.jax.blocks.experts.mixture`.
        others: those of `MoEOptions` and DenseGeneral.

    A call returns the output, or with `return_routing` (output, `Routing`). The collection "losses", if it is mutable,
    gets `balance_loss` and `z_loss`.
    """

    hidden: int
    experts: int
    k: int

    @nn.compact
    def __call__(self, x: Array) -> Any:
        check_options(self)
        x = array("MoE", "x", x)
        dim = x.shape[-1]
        tokens = x.reshape(-1, dim)
        kernel = self.param("router", self.kernel_init, (dim, self.experts), self.param_dtype)
        bias = balance = None
        if self.router_bias:
            bias = self.param("router_bias", self.bias_init, (self.experts,), self.param_dtype)
        if self.balance_bias:
            balance = self.variable("router", "balance", lambda: jnp.zeros(self.experts, jnp.float32)).value
        routing = routed(tokens, kernel, bias, balance, self)
        layers = {
            name: GroupedDense(
                shape[0],
                shape[2:],
                kernel_axes=axes if self.partition else (),
                **pick(DenseOptions, self),
                name=name,
            )
            for name, (shape, axes) in expert_kernels(self, dim).items()
        }
        wi, wo = layers["wi"], layers["wo"]
        y = mixture(tokens, routing, wi.weights(dim), wo.weights(self.hidden), self, (wi.how(), wo.how()))
        if self.shared:
            z = MLP(self.shared, self.activation, **pick(PartOptions, self), name="shared")(tokens)
            if self.shared_gate:
                gate = self.param("shared_gate", self.kernel_init, (dim, 1), self.param_dtype)
                z = z * sigmoid_gate(tokens, gate).astype(z.dtype)
            y = y + z
        if self.is_mutable_collection("losses") and not self.is_initializing():
            self.sow("losses", "balance_loss", balance_loss(routing))
            self.sow("losses", "z_loss", z_loss(routing))
        y = y.reshape(x.shape)
        return (y, routing) if self.return_routing else y
