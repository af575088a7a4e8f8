"""Common code of Transformer Engine's linen modules: fields, parameters, and one GEMM with its state."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from quaver.compat.transformer_engine.jax.sharding import Axes, with_sharding_constraint_by_logical_axes
from quaver.jax.blocks.layers import NORMALIZATIONS
from quaver.jax.blocks.options import Initializer
from quaver.jax.linears.dot_general import dense, normalize_axes
from quaver.jax.linen.dense import layer_state, qualified_name
from quaver.options import FLAX
from quaver.recipes.text import check_name

M = TypeVar("M", bound=nn.Module)
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
KERNEL_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
OF_ATTENTION = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


@dataclass(kw_only=True)
class DenseFields:
    """Fields of every module with a matrix; `dtype` is that of parameters, results have the input's dtype."""

    kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: DTypeLike = jnp.float32
    # No effect: which of the first two axes is the batch does not matter here.
    transpose_batch_sequence: bool = False
    # Unsupported: codes have no name for jax.checkpoint.
    quantization_checkpoint_name: str | None = None


@dataclass(kw_only=True)
class NormFields:
    """Fields of modules that normalize their input."""

    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    return_layernorm_output: bool = False
    layernorm_input_axes: Axes = None


class Product(nn.Module):
    """One GEMM of a module with several: its state is stored under its own name, its kernel in the module."""

    @nn.compact
    def __call__(self, x: Array, kernel: Array, bias: Array | None = None, axis: int | Sequence[int] = -1) -> Array:
        return product(self, x, kernel, bias, axis)


def product(owner: Any, x: Array, kernel: Array, bias: Array | None, axis: int | Sequence[int] = -1) -> Array:
    """Multiply x by a kernel under the active recipe, with the state of a module."""
    return dense(x, kernel, bias, axis=axis, dtype=x.dtype, state=layer_state(owner, None), name=qualified_name(owner))


def with_adapters(
    module: Any, y: Array, x: Array, axes: int | Sequence[int], features: Sequence[int], prefix: str = ""
) -> Array:
    """Add a module's low-rank adapters of x to y, if it has them: alpha / rank × x A B.

    Their parameters are `lora_a_kernel` [*inputs, *features[:-1], rank] and `lora_b_kernel` [*features[:-1], rank,
    features[-1]], as in Transformer Engine. They are multiplied in high precision.

    Args:
        module: a module with `DenseFields`.
        y: output [..., *features].
        x: input, contracted over `axes`.
        axes: axes of x.
        features: output features.
        prefix: prefix of the parameters' names.
    """
    if not module.enable_low_rank_adaptation:
        return y
    rank, alpha, own = module.low_rank_adaptation_dim, module.low_rank_adaptation_alpha, tuple(features)
    axes = normalize_axes(axes, x.ndim)
    shape_a = (*(x.shape[axis] for axis in axes), *own[:-1], rank)
    a = parameter(module, f"{prefix}lora_a_kernel", module.kernel_init or KERNEL_INIT, (None,) * len(shape_a), shape_a)
    shape_b = (*own[:-1], rank, own[-1])
    zeros = nn.initializers.zeros
    b = parameter(module, f"{prefix}lora_b_kernel", zeros, (None,) * len(shape_b), shape_b)
    low = jnp.tensordot(x, a.astype(x.dtype), (axes, tuple(range(len(axes)))))  # [..., *features[:-1], rank]
    added = jnp.einsum(f"...{_OUT[: len(own) - 1]}r,{_OUT[: len(own) - 1]}rz->...{_OUT[: len(own) - 1]}z", low, b)
    return y + (added * (1.0 if alpha is None else alpha / rank)).astype(y.dtype)


_OUT = "abcdefgh"


def parameter(module: Any, name: str, init: Initializer, axes: Axes, shape: Sequence[int]) -> Array:
    """Create a parameter in a module's dtype, with logical axis names for Flax's sharding rules if given."""
    if axes and len(axes) != len(shape):
        raise ValueError(f"{name} has shape {tuple(shape)}, and {axes} names {len(axes)} axes; name all of them")
    value: Array = module.param(
        name, nn.with_logical_partitioning(init, axes) if axes else init, tuple(shape), module.dtype
    )
    return value


def normalized(module: Any, x: Array, bias_init: Initializer, bias_axes: Axes) -> Array:
    """Apply a module's norm, with the parameters `scale` and, for a LayerNorm, `ln_bias`."""
    check_name("layernorm_type", module.layernorm_type, NORMS)
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    init = module.scale_init or (zeros if module.zero_centered_gamma else ones)
    scale = parameter(module, "scale", init, module.scale_axes, x.shape[-1:])
    bias = None
    if module.layernorm_type == "layernorm":
        bias = parameter(module, "ln_bias", bias_init, bias_axes, x.shape[-1:])
    norm = NORMALIZATIONS[NORMS[module.layernorm_type]]
    return norm(x, scale, bias, eps=module.epsilon, zero_centered=module.zero_centered_gamma)


def constrained(x: Array, axes: Axes) -> Array:
    """Shard an array by logical axes, if given."""
    return with_sharding_constraint_by_logical_axes(x, axes)


def normalized_input(module: Any, x: Array) -> Array:
    """Return a module's input, normalized if enabled."""
    if not module.enable_layernorm:
        return x
    return normalized(module, constrained(x, module.layernorm_input_axes), module.ln_bias_init, module.ln_bias_axes)


def part_of(module: Any, kind: type[M], **own: Any) -> M:
    """Create a submodule with the values of all fields that both modules have, except those in `own`."""
    named = {f.name for f in fields(kind)}.difference(FLAX, own)
    return kind(**{name: getattr(module, name) for name in named if hasattr(module, name)}, **own)


def refuse(module: Any, why: str, **usual: Any) -> None:
    """Raise a ValueError for fields without their only supported value.

    Args:
        module: the module.
        why: advice for the message.
        usual: supported values by field name.
    """
    for name, value in usual.items():
        passed = getattr(module, name)
        if passed != value:
            raise ValueError(f"{type(module).__name__}.{name}={passed!r} is not supported: leave it {value!r}, {why}")


def refuse_dense(module: Any, **usual: Any) -> None:
    """Raise a ValueError for names of codes, and further fields without their supported value."""
    refuse(module, "codes have no name for jax.checkpoint", quantization_checkpoint_name=None)
    refuse(module, "as in Transformer Engine", **usual)
