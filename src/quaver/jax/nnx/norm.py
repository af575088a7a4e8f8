"""LayerNorm and RMSNorm, and a linear layer behind one."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from quaver.jax.nnx.dense import DenseGeneral
from quaver.jax.nnx.variable import joined
from quaver.jax.norm import layer_norm, rms_norm


class LayerNorm(nnx.Module):
    """`quaver.jax.norm.layer_norm` with parameters `scale` and `bias`; the result has x's dtype."""

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
    """`quaver.jax.norm.rms_norm` with a parameter `scale`; the result has x's dtype."""

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


def make_norm(normalization: str, features: int, **options: Any) -> Any:
    """The module of this name.

    Raises:
        ValueError: there is none.
    """
    if normalization not in NORMS:
        raise ValueError(f"normalization is {normalization!r}; give one of {', '.join(map(repr, NORMS))}")
    return NORMS[normalization](features, **options)


class LayerNormDenseGeneral(nnx.Module):
    """DenseGeneral of the normalized input: submodules `norm` and `dense`.

    Args:
        in_features, features: sizes of input and output.
        normalization, eps, zero_centered: of the norm.
        options: DenseGeneral's.
    Calling it returns the output, and the normalized input.
    """

    def __init__(
        self,
        in_features: int,
        features: int | Sequence[int],
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
        self.dense = DenseGeneral(
            in_features, features, param_dtype=param_dtype, name=joined(name, "dense"), rngs=rngs, **options
        )

    def __call__(self, x: Array) -> tuple[Array, Array]:
        normalized = self.norm(x)
        return self.dense(normalized), normalized
