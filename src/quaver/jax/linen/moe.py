"""Mixture of experts for linen: grouped linear layers of all experts, and the layer that routes tokens to them."""

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.blocks.layers import matrices
from quaver.jax.blocks.mixture import gated, mixture
from quaver.jax.blocks.moe import Routing
from quaver.jax.blocks.options import Initializer, KernelOptions, MixtureOptions, check_mixture
from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.linears.grouped import grouped_dot
from quaver.jax.linen.dense import layer_state, qualified_name
from quaver.jax.linen.mlp import MLP
from quaver.options import pick, suggests


@suggests
class GroupedDense(nn.Module, KernelOptions):
    """A linear layer per expert, with a parameter `kernel` [experts, K, *features]; no bias.

    Attributes:
        experts: number of experts.
        features: output features; several make several axes.
        kernel_axes: logical names of the kernel's axes, for flax's sharding rules; empty for none.
        others: those of DenseGeneral. All experts share one state.
    """

    experts: int
    features: tuple[int, ...]
    kernel_axes: tuple[str | None, ...] = field(default=(), kw_only=True)

    @nn.compact
    def __call__(self, rows: Array, group_sizes: Array) -> Array:
        """Return [R, *features] of rows [R, K], where the first group_sizes[0] rows belong to expert 0, and so on."""
        shape = self.experts, rows.shape[-1], *self.features
        init: Initializer = self._init_matrices
        init = nn.with_logical_partitioning(init, self.kernel_axes) if self.kernel_axes else init
        kernel: Any = self.param("kernel", init, shape, self.param_dtype)
        y = grouped_dot(
            rows,
            kernel.reshape(*shape[:2], -1),
            group_sizes,
            recipe=self.recipe,
            state=layer_state(self, self.recipe, self.uses),
            dtype=self.dtype,
            name=qualified_name(self) or "grouped",
            seed=self.seed,
        )
        return y.reshape(-1, *self.features)

    def _init_matrices(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Draw a matrix per expert, so that fan-in is correct."""
        kernel: Array = self.kernel_init(key, (*shape[:2], math.prod(shape[2:])), dtype)
        return kernel.reshape(shape)


@suggests
class MoE(nn.Module, MixtureOptions, KernelOptions):
    """Mixture of experts: a router in float32, an MLP per expert, and an optional shared MLP for all tokens.

    Attributes:
        hidden: hidden features of each expert.
        experts, k: number of experts, and number of experts per token.
        partition: name the kernels' axes "expert", "embed" and "mlp", for flax's logical sharding rules.
        others: those of `MixtureOptions` and of DenseGeneral; no layer has a bias. Parameters are `router`
            [D, experts], `router_bias` and `shared_gate` [D, 1]; submodules are `wi` and `wo` (`GroupedDense`) and
            `shared` (`MLP`). The balancing bias is `balance` in the collection "router_balance".
    Exact: codes and scales of the experts' layers as `quaver.jax.grouped_dot`.
    """

    hidden: int
    activation: str = "swiglu"
    partition: bool = field(default=False, kw_only=True)

    @nn.compact
    def __call__(self, x: Array) -> Array | tuple[Array, Routing]:
        """Return [..., D] of x [..., D]; with `return_routing` also the `Routing` of all tokens."""
        check_mixture(self)
        features = x.shape[-1]
        both = matrices(self.activation, self.hidden, features)
        wi, wo = (self._layer(name, matrix) for name, matrix in both.items())
        kernel = self.param("router", self.kernel_init, (features, self.experts), self.param_dtype)
        bias = balance = None
        if self.router_bias:
            bias = self.param("router_bias", nn.initializers.zeros, (self.experts,), self.param_dtype)
        if self.balance_bias:
            balance = self.variable("router_balance", "balance", jnp.zeros, (self.experts,), jnp.float32).value
        y, routing = mixture(x, self, self.activation, (kernel, bias, balance), (wi, wo), self._shared(features))
        return (y, routing) if self.return_routing else y

    def _layer(self, name: str, matrix: KernelMatrix) -> GroupedDense:
        axes = ("expert", *matrix.axes) if self.partition else ()
        return GroupedDense(
            experts=self.experts, features=matrix.features, kernel_axes=axes, **pick(KernelOptions, self), name=name
        )

    def _shared(self, features: int) -> Callable[[Array], Array] | None:
        """Return the function of the shared MLP, or None."""
        if not self.shared:
            return None
        own = pick(KernelOptions, self)
        mlp = MLP(self.shared, self.activation, use_bias=False, partition=self.partition, **own, name="shared")
        if not self.shared_gate:
            return mlp
        gate = self.param("shared_gate", self.kernel_init, (features, 1), self.param_dtype)
        return lambda tokens: gated(mlp(tokens), tokens, gate)
