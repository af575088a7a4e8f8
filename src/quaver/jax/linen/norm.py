"""LayerNorm and RMSNorm, and a linear layer behind one."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.core.spec import Recipe
from quaver.jax.given import array
from quaver.jax.linen.dense import DenseGeneral, Initializer
from quaver.jax.norm import layer_norm, rms_norm


class LayerNorm(nn.Module):
    """`quaver.jax.norm.layer_norm` with parameters `scale` and `bias`; the result has x's dtype."""

    eps: float = 1e-6
    zero_centered: bool = False
    use_bias: bool = True
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = array(type(self).__name__, "x", x)
        init = nn.initializers.zeros if self.zero_centered else nn.initializers.ones
        scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype) if self.use_bias else None
        return layer_norm(x, scale, bias, eps=self.eps, zero_centered=self.zero_centered)


class RMSNorm(nn.Module):
    """`quaver.jax.norm.rms_norm` with a parameter `scale`; the result has x's dtype."""

    eps: float = 1e-6
    zero_centered: bool = False
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = array(type(self).__name__, "x", x)
        init = nn.initializers.zeros if self.zero_centered else nn.initializers.ones
        scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        return rms_norm(x, scale, eps=self.eps, zero_centered=self.zero_centered)


#: The norm modules by the name that other modules take.
NORMS: dict[str, Any] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def make_norm(normalization: str, **options: Any) -> Any:
    """The module of this name.

    Raises:
        ValueError: there is none.
    """
    if normalization not in NORMS:
        raise ValueError(f"normalization is {normalization!r}; give one of {', '.join(map(repr, NORMS))}")
    return NORMS[normalization](**options)


class LayerNormDenseGeneral(nn.Module):
    """DenseGeneral of the normalized input: submodules `norm` and `dense`.

    Attributes are those of LayerNorm or RMSNorm, and of DenseGeneral.
    Returns:
        The output, and the normalized input.
    """

    features: int | Sequence[int]
    normalization: str = "LayerNorm"
    eps: float = 1e-6
    zero_centered: bool = False
    use_bias: bool = True
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    kernel_axes: tuple[str | None, ...] = ()
    bias_axes: tuple[str | None, ...] = ()
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
        dense = DenseGeneral(
            self.features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            kernel_axes=self.kernel_axes,
            bias_axes=self.bias_axes,
            recipe=self.recipe,
            seed=self.seed,
            name="dense",
        )
        normalized = norm(x)
        return dense(normalized), normalized
