"""LayerNorm and RMSNorm, and a linear layer behind one."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.core.options import checks, pick, takes
from quaver.jax.blocks.norm import layer_norm, named, rms_norm
from quaver.jax.blocks.options import NormOptions
from quaver.jax.nnx.dense import DenseArguments, DenseGeneral, of_part


class LayerNorm(nnx.Module):
    """`quaver.jax.blocks.norm.layer_norm` with parameters `scale` and `bias`; the result has x's dtype."""

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
    """`quaver.jax.blocks.norm.rms_norm` with a parameter `scale`; the result has x's dtype."""

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


#: The norm modules by the name that other modules take.
NORMS: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def norm_of(options: Any, features: int) -> Any:
    """The normalization that a layer's options say.

    Raises:
        ValueError: there is none of that name.
    """
    kind = named(options.normalization, NORMS)
    return kind(features, eps=options.eps, zero_centered=options.zero_centered, param_dtype=options.param_dtype)


@dataclass
class LayerNormDenseArguments(DenseArguments, NormOptions):
    """The arguments of `LayerNormDenseGeneral`."""

    in_features: int


class LayerNormDenseGeneral(nnx.Module):
    """DenseGeneral of the normalized input: submodules `norm` and `dense`.

    Args:
        in_features, features: sizes of input and output.
        normalization, eps, zero_centered: of the norm.
        others: those of DenseGeneral.
    Calling it returns the output, and the normalized input.
    """

    @takes(LayerNormDenseArguments)
    def __init__(self, options: LayerNormDenseArguments) -> None:
        self.norm = norm_of(options, options.in_features)
        self.dense = DenseGeneral(**pick(DenseArguments, options) | of_part(options, "dense"))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.dense(normalized), normalized
