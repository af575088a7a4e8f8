"""Norms, and the MLP of a Transformer with and without a norm in front."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.blocks.layers import activate_fused, layer_norm, matrices, named, rms_norm
from quaver.jax.blocks.options import MLPOptions, NormOptions
from quaver.jax.nnx.dense import DenseArguments, DenseGeneral, Parameters, dense_of, of_part
from quaver.options import checks, pick, takes

# ---- LayerNorm and RMSNorm, and a linear layer after one ----


class LayerNorm(nnx.Module):
    """Module of `quaver.jax.blocks.layers.layer_norm` with parameters `scale` and `bias`; the result has x's dtype."""

    @checks
    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        use_bias: bool = True,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.scale = nnx.Param(jnp.full(features, 0.0 if zero_centered else 1.0, param_dtype))
        self.bias = nnx.Param(jnp.zeros(features, param_dtype)) if use_bias else nnx.data(None)
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Array) -> Array:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, eps=self.eps, zero_centered=self.zero_centered)


class RMSNorm(nnx.Module):
    """Module of `quaver.jax.blocks.layers.rms_norm` with a parameter `scale`; the result has x's dtype."""

    @checks
    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.scale = nnx.Param(jnp.full(features, 0.0 if zero_centered else 1.0, param_dtype))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.scale[...], eps=self.eps, zero_centered=self.zero_centered)


#: Norm modules by the name that other modules take.
NORMS: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def norm_of(options: Any, features: int) -> Any:
    """Return the normalization module that a layer's options select.

    Raises:
        ValueError: unknown name.
    """
    kind = named(options.normalization, NORMS)
    return kind(features, eps=options.eps, zero_centered=options.zero_centered, param_dtype=options.param_dtype)


@dataclass
class LayerNormDenseArguments(DenseArguments, NormOptions):
    """Constructor arguments of `LayerNormDenseGeneral`; see there."""

    in_features: int


class LayerNormDenseGeneral(nnx.Module):
    """DenseGeneral of the normalized input, with submodules `norm` and `dense`.

    Args:
        in_features, features: sizes of input and output.
        normalization, eps, zero_centered: of the norm.
        others: those of DenseGeneral.

    A call returns the output and the normalized input.
    """

    @takes(LayerNormDenseArguments)
    def __init__(self, options: LayerNormDenseArguments) -> None:
        self.norm = norm_of(options, options.in_features)
        self.dense = DenseGeneral(**pick(DenseArguments, options) | of_part(options, "dense"))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.dense(normalized), normalized


# ---- MLP ----


@dataclass
class MLPArguments(MLPOptions, Parameters):
    """Constructor arguments of `MLP`; see there."""

    in_features: int
    hidden: int
    _: KW_ONLY
    activation: str = "gelu"


class MLP(nnx.Module):
    """MLP of two DenseGeneral, `wi` and `wo`, with an activation between them; `wi` computes gate and value if gated.

    Args:
        in_features, hidden: features of the input, and hidden features.
        activation: a name in `quaver.jax.blocks.layers.ACTIVATIONS`.
        out: features of the output; None uses the input's.
        partition: name the kernels' axes "embed" and "mlp", for nnx.logical_axis_rules.
        others: those of DenseGeneral, except axis, kernel_axes and bias_axes.
    """

    @takes(MLPArguments)
    def __init__(self, options: MLPArguments) -> None:
        both = matrices(options.activation, options.hidden, options.out or options.in_features)
        self.activation = options.activation
        self.features = both["wi"].features
        self.wi = dense_of(options, "wi", options.in_features, both["wi"])
        self.wo = dense_of(options, "wo", options.hidden, both["wo"])

    def __call__(self, x: Array) -> Array:
        return self.wo(activate_fused(self.activation, self.wi(x), len(self.features)))


@dataclass
class LayerNormMLPArguments(MLPArguments, NormOptions):
    """Constructor arguments of `LayerNormMLP`; see there."""


class LayerNormMLP(nnx.Module):
    """MLP of the normalized input, with submodules `norm` and `mlp` and their arguments.

    A call returns the output and the normalized input.
    """

    @takes(LayerNormMLPArguments)
    def __init__(self, options: LayerNormMLPArguments) -> None:
        self.norm = norm_of(options, options.in_features)
        self.mlp = MLP(**pick(MLPArguments, options) | of_part(options, "mlp"))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.mlp(normalized), normalized
