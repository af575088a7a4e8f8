"""The MLP of a Transformer, with and without a norm before it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.mlp import activate_fused, hidden_features
from quaver.jax.nnx.dense import DenseGeneral
from quaver.jax.nnx.norm import make_norm
from quaver.jax.nnx.variable import joined


class MLP(nnx.Module):
    """Two DenseGeneral, `wi` and `wo`, and an activation between them; `wi` gives gate and value of a gated one.

    Args:
        in_features, hidden: of the input, and between the two.
        activation: a row of `quaver.jax.activation.ACTIVATIONS`.
        out: features of the output; None keeps the input's.
        partition: name the kernels' axes "embed" and "mlp", for nnx.logical_axis_rules.
        options: DenseGeneral's.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        *,
        activation: str = "gelu",
        out: int | None = None,
        partition: bool = False,
        name: str = "",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.activation = activation
        self.features = hidden_features(activation, hidden)
        inner: tuple[str | None, ...] = ("mlp", None)[: len(self.features)]

        def make(part: str, rows: int, columns: Any, *axes: str | None) -> DenseGeneral:
            return DenseGeneral(
                rows,
                columns,
                kernel_axes=axes if partition else (),
                bias_axes=axes[1:] if partition else (),
                name=joined(name, part),
                rngs=rngs,
                **options,
            )

        self.wi = make("wi", in_features, self.features, "embed", *inner)
        self.wo = make("wo", hidden, out or in_features, "mlp", "embed")

    def __call__(self, x: Array) -> Array:
        return self.wo(activate_fused(self.activation, self.wi(x), len(self.features)))


class LayerNormMLP(nnx.Module):
    """MLP of the normalized input: submodules `norm` and `mlp`, with their arguments.

    Calling it returns the output, and the normalized input.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        *,
        normalization: str = "LayerNorm",
        eps: float = 1e-6,
        zero_centered: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        name: str = "",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.norm = make_norm(normalization, in_features, eps=eps, zero_centered=zero_centered, param_dtype=param_dtype)
        self.mlp = MLP(in_features, hidden, param_dtype=param_dtype, name=joined(name, "mlp"), rngs=rngs, **options)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.mlp(normalized), normalized
