"""Norms, and the MLP of a Transformer with and without a norm in front."""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.blocks.layers import activate_fused, layer_norm, matrices, named, rms_norm
from quaver.jax.blocks.options import DenseOptions, MLPOptions, NormOptions
from quaver.jax.linen.dense import DenseGeneral, dense_of
from quaver.jax.numerics.quantized import array
from quaver.options import pick, suggests

# ---- LayerNorm and RMSNorm, and a linear layer after one ----


@suggests
class LayerNorm(nn.Module):
    """Module of `quaver.jax.blocks.layers.layer_norm` with parameters `scale` and `bias`; the result has x's dtype."""

    eps: float = 1e-6
    zero_centered: bool = False
    use_bias: bool = True
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x, scale = _scaled(self, x)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype) if self.use_bias else None
        return layer_norm(x, scale, bias, eps=self.eps, zero_centered=self.zero_centered)


@suggests
class RMSNorm(nn.Module):
    """Module of `quaver.jax.blocks.layers.rms_norm` with a parameter `scale`; the result has x's dtype."""

    eps: float = 1e-6
    zero_centered: bool = False
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x, scale = _scaled(self, x)
        return rms_norm(x, scale, eps=self.eps, zero_centered=self.zero_centered)


def _scaled(norm: Any, x: Array) -> tuple[Array, Array]:
    """Return the input as an array, and the norm's scale parameter."""
    x = array(type(norm).__name__, "x", x)
    init = nn.initializers.zeros if norm.zero_centered else nn.initializers.ones
    return x, norm.param("scale", init, x.shape[-1:], norm.param_dtype)


#: Norm modules by the name that other modules take.
NORMS: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def norm_of(layer: Any, name: str) -> Any:
    """Return the normalization module that a layer's options select.

    Raises:
        ValueError: unknown name.
    """
    kind = named(layer.normalization, NORMS)
    return kind(eps=layer.eps, zero_centered=layer.zero_centered, param_dtype=layer.param_dtype, name=name)


@suggests
class LayerNormDenseGeneral(nn.Module, DenseOptions, NormOptions):
    """DenseGeneral of the normalized input, with submodules `norm` and `dense`.

    Attributes are those of LayerNorm or RMSNorm, and of DenseGeneral. A call returns the output and the normalized
    input.
    """

    features: int | Sequence[int]
    kernel_axes: tuple[str | None, ...] = field(default=(), kw_only=True)
    bias_axes: tuple[str | None, ...] = field(default=(), kw_only=True)

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = norm_of(self, "norm")(x)
        dense = DenseGeneral(
            self.features,
            kernel_axes=self.kernel_axes,
            bias_axes=self.bias_axes,
            **pick(DenseOptions, self),
            name="dense",
        )
        return dense(normalized), normalized


# ---- MLP ----


@suggests
class MLP(nn.Module, MLPOptions):
    """MLP of two DenseGeneral, `wi` and `wo`, with an activation between them; `wi` computes gate and value if gated.

    Attributes:
        hidden: hidden features.
        activation: a name in `quaver.jax.blocks.layers.ACTIVATIONS`.
        out: features of the output; None uses the input's.
        partition: name the kernels' axes "embed" and "mlp", for flax's logical sharding rules.
        others: those of DenseGeneral.
    """

    hidden: int
    activation: str = "gelu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        both = matrices(self.activation, self.hidden, self.out or x.shape[-1])
        wi, wo = (dense_of(self, name, matrix) for name, matrix in both.items())
        return wo(activate_fused(self.activation, wi(x), len(both["wi"].features)))


@suggests
class LayerNormMLP(nn.Module, MLPOptions, NormOptions):
    """MLP of the normalized input, with submodules `norm` and `mlp` and their attributes.

    A call returns the output and the normalized input.
    """

    hidden: int
    activation: str = "gelu"

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = norm_of(self, "norm")(x)
        mlp = MLP(self.hidden, self.activation, **pick(MLPOptions, self), name="mlp")
        return mlp(normalized), normalized
