"""The MLP of a Transformer, with and without a norm before it."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.linen.dense import DenseGeneral, Initializer
from quaver.jax.linen.norm import make_norm
from quaver.jax.mlp import activate_fused, hidden_features


class MLP(nn.Module):
    """Two DenseGeneral, `wi` and `wo`, and an activation between them; `wi` gives gate and value of a gated one.

    Attributes:
        hidden: features between the two.
        activation: a row of `quaver.jax.activation.ACTIVATIONS`.
        out: features of the output; None keeps the input's.
        partition: name the kernels' axes "embed" and "mlp", for flax's logical sharding rules.
        The others are DenseGeneral's.
    """

    hidden: int
    activation: str = "gelu"
    out: int | None = None
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    partition: bool = False
    recipe: str | Recipe | None = None
    seed: int = 0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        features = hidden_features(self.activation, self.hidden)
        inner: tuple[str | None, ...] = ("mlp", None)[: len(features)]
        h = self._dense(features, "wi", ("embed", *inner), inner)(x)
        h = activate_fused(self.activation, h, len(features))
        return self._dense(self.out or x.shape[-1], "wo", ("mlp", "embed"), ("embed",))(h)

    def _dense(self, features: Any, name: str, kernel_axes: Any, bias_axes: Any) -> DenseGeneral:
        return DenseGeneral(
            features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=kernel_axes if self.partition else (),
            bias_axes=bias_axes if self.partition else (),
            recipe=self.recipe,
            seed=self.seed,
            name=name,
        )


class LayerNormMLP(nn.Module):
    """MLP of the normalized input: submodules `norm` and `mlp`, with their attributes.

    Returns:
        The output, and the normalized input.
    """

    hidden: int
    activation: str = "gelu"
    normalization: str = "LayerNorm"
    eps: float = 1e-6
    zero_centered: bool = False
    out: int | None = None
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    partition: bool = False
    recipe: str | Recipe | None = None
    seed: int = 0

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        norm = make_norm(
            self.normalization,
            eps=self.eps,
            zero_centered=self.zero_centered,
            param_dtype=self.param_dtype,
            name="norm",
        )
        mlp = MLP(
            self.hidden,
            self.activation,
            self.out,
            self.use_bias,
            self.dtype,
            self.param_dtype,
            self.kernel_init,
            self.bias_init,
            self.partition,
            self.recipe,
            self.seed,
            name="mlp",
        )
        normalized = norm(x)
        return mlp(normalized), normalized
