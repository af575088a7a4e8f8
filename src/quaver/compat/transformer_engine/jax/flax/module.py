"""Transformer Engine's linen layers: norm, linear layers with and without a norm, and MLP."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from quaver.compat.transformer_engine.common.recipe import recipe_of
from quaver.compat.transformer_engine.jax.flax.fields import (
    KERNEL_INIT,
    DenseFields,
    NormFields,
    Product,
    constrained,
    normalized,
    normalized_input,
    parameter,
    product,
    refuse_dense,
    with_adapters,
)
from quaver.compat.transformer_engine.jax.sharding import Axes
from quaver.jax.blocks.layers import ACTIVATIONS, activate
from quaver.jax.blocks.options import Initializer
from quaver.jax.linears.dot_general import normalize_axes
from quaver.jax.linen.dense import dot_general_cls
from quaver.options import suggests
from quaver.recipes.text import check_name

#: Activation functions by name; an MLP multiplies the results of several.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    name: ACTIVATIONS[name].function for name in ("linear", "gelu", "silu", "relu", "quick_gelu", "squared_relu")
} | {"sigmoid": jax.nn.sigmoid}
CLAMPED = ("clamped_silu", "clamped_linear")


@suggests
class LayerNorm(nn.Module):
    """A norm over the last axis; parameters `scale` and, for a LayerNorm, `ln_bias`."""

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ("embed",)
    dtype: DTypeLike = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return normalized(self, x, self.bias_init, self.bias_axes)


@suggests
class DenseGeneral(nn.Module, DenseFields):
    """A linear layer over any axes; parameters `kernel` and `bias`.

    Raises:
        ValueError: `quantization_checkpoint_name`.
    """

    features: int | Sequence[int]
    use_bias: bool = field(default=True, kw_only=True)
    kernel_axes: Axes = field(default=(), kw_only=True)
    bias_axes: Axes = field(default=(), kw_only=True)
    input_axes: Axes = field(default=(), kw_only=True)

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        refuse_dense(self)
        axes = normalize_axes(self.axis, inputs.ndim)
        sizes = tuple(inputs.shape[a] for a in axes)
        kernel, bias = matrix(self, "kernel", "bias", sizes, self.features, self.kernel_axes, self.bias_axes)
        x = constrained(inputs, self.input_axes)
        return with_adapters(self, product(self, x, kernel, bias, axes), x, axes, kernel.shape[len(axes) :])


@suggests
class LayerNormDenseGeneral(nn.Module, NormFields, DenseFields):
    """A norm and a linear layer; returns the output, and the norm's output or None.

    Raises:
        ValueError: an axis other than the last.
    """

    features: int | Sequence[int]
    use_bias: bool = field(default=False, kw_only=True)
    kernel_axes: Axes = field(default=(), kw_only=True)
    bias_axes: Axes = field(default=(), kw_only=True)
    dot_input_axes: Axes = field(default=None, kw_only=True)
    #: Divisor of the output.
    depth_scaling: float | None = field(default=None, kw_only=True)

    @nn.compact
    def __call__(self, inputs: Array) -> tuple[Array, Array | None]:
        refuse_dense(self, axis=-1)
        y = normalized_input(self, inputs)
        kernel, bias = matrix(self, "kernel", "bias", y.shape[-1:], self.features, self.kernel_axes, self.bias_axes)
        x = constrained(y, self.dot_input_axes)
        z = with_adapters(self, product(self, x, kernel, bias), x, -1, kernel.shape[1:])
        if self.depth_scaling is not None:
            z = z / self.depth_scaling
        return z, y if self.return_layernorm_output else None


@suggests
class LayerNormMLP(nn.Module, NormFields, DenseFields):
    """A norm and an MLP; returns the output, and the norm's output or None.

    Parameters are `wi_kernel` [features, parts, hidden] with a part for each of `activations`, `wi_bias`, `wo_kernel`
    and `wo_bias`.

    Raises:
        ValueError: an axis other than the last, or an unknown activation.
    """

    intermediate_dim: int = 2048
    use_bias: bool = field(default=False, kw_only=True)
    kernel_axes_1: Axes = field(default=("embed", "act", "mlp"), kw_only=True)
    kernel_axes_2: Axes = field(default=("mlp", "embed"), kw_only=True)
    bias_axes_1: Axes = field(default=("act", "mlp"), kw_only=True)
    bias_axes_2: Axes = field(default=("embed",), kw_only=True)
    activations: Sequence[str | Callable[[Array], Array]] = field(default=("gelu",), kw_only=True)
    #: `limit` and `alpha` of ("clamped_silu", "clamped_linear").
    activation_params: Mapping[str, float] | None = field(default=None, kw_only=True)
    intermediate_dropout_rng_name: str = field(default="dropout", kw_only=True)
    intermediate_dropout_rate: float = field(default=0.0, kw_only=True)
    intermediate_hidden_dropout_dims: Sequence[int] = field(default=(), kw_only=True)
    dot_1_input_axes: Axes = field(default=None, kw_only=True)
    dot_2_input_axes: Axes = field(default=None, kw_only=True)
    ffn1_ckpt_name: str = field(default="ffn1", kw_only=True)
    ffn2_ckpt_name: str = field(default="ffn2", kw_only=True)

    @nn.compact
    def __call__(self, inputs: Array, deterministic: bool = False) -> tuple[Array, Array | None]:
        refuse_dense(self, axis=-1)
        y, init = normalized_input(self, inputs), self.kernel_init or KERNEL_INIT
        outer, parts = y.shape[-1], (len(self.activations), self.intermediate_dim)
        both = (self.kernel_axes_1, self.bias_axes_1), (self.kernel_axes_2, self.bias_axes_2)
        wi = matrix(self, "wi_kernel", "wi_bias", (outer,), parts, *both[0], init=stacked_init(init))
        wo = matrix(self, "wo_kernel", "wo_bias", parts[1:], outer, *both[1], init=init)
        x = constrained(y, self.dot_1_input_axes)
        z = with_adapters(self, Product(name="wi")(x, *wi), x, -1, parts, "wi_")
        z = activated(checkpoint_name(z, self.ffn1_ckpt_name), self.activations, self.activation_params)
        z = nn.Dropout(
            self.intermediate_dropout_rate,
            broadcast_dims=self.intermediate_hidden_dropout_dims,
            rng_collection=self.intermediate_dropout_rng_name,
        )(z, deterministic=deterministic)
        x = constrained(z, self.dot_2_input_axes)
        z = with_adapters(self, Product(name="wo")(x, *wo), x, -1, (outer,), "wo_")
        return checkpoint_name(z, self.ffn2_ckpt_name), y if self.return_layernorm_output else None


def matrix(
    module: Any, kernel: str, bias: str, inputs: Sequence[int], outputs: int | Sequence[int], kernel_axes: Axes,
    bias_axes: Axes, init: Initializer | None = None,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Create a module's kernel, and its bias or None; `init` replaces the module's own initializer."""
    outputs = (outputs,) if isinstance(outputs, int) else tuple(outputs)
    drawn_by = init or module.kernel_init or KERNEL_INIT
    value = parameter(module, kernel, drawn_by, kernel_axes, (*inputs, *outputs))
    return value, parameter(module, bias, module.bias_init, bias_axes, outputs) if module.use_bias else None


def stacked_init(*inits: Initializer) -> Initializer:
    """Return an initializer of [inputs, parts, outputs] that draws each part separately, by its own or a common
    initializer.
    """

    def initialize(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Array:
        each = inits if len(inits) > 1 else inits * shape[1]
        if len(inits) > 1:
            keys = list(jax.random.split(key, len(each)))
        else:
            keys = []
            for _ in each:
                key, own = jax.random.split(key)
                keys.append(own)
        drawn = [init(k, (shape[0], *shape[2:]), dtype) for init, k in zip(each, keys, strict=True)]
        return jnp.stack(drawn, 1, dtype=dtype)

    return initialize


def activated(x: Array, names: Sequence[str | Callable[[Array], Array]], params: Mapping[str, float] | None) -> Array:
    """Apply each part's activation in float32 and multiply them: [..., parts, hidden] to [..., hidden].

    Raises:
        ValueError: an unknown name, or parameters for an activation other than the clamped one.
    """
    if tuple(names) == CLAMPED:
        return activate("clamped_swiglu", x[..., 0, :], x[..., 1, :], **(params or {}))
    if params:
        raise ValueError(
            f"activation_params are only for activations={CLAMPED}, and here activations are {tuple(names)}"
        )
    if not names:
        raise ValueError("activations is empty; give one name or more, such as ('silu', 'linear')")
    for name in names:
        if not callable(name):
            check_name("activation", name, [*FUNCTIONS, *CLAMPED])
    functions = [name if callable(name) else FUNCTIONS[name] for name in names]
    parts = [function(x[..., i, :].astype(jnp.float32)) for i, function in enumerate(functions)]
    return math.prod(parts[1:], start=parts[0]).astype(x.dtype)


def make_dot_general_cls(quantization_recipe: Any) -> Callable[[], Any]:
    """Return `quaver.jax.linen.dot_general_cls` of a recipe, for the field `dot_general_cls` of flax.linen's layers."""
    return dot_general_cls(recipe_of(quantization_recipe))
