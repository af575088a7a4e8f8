"""The options of Flax's modules, the same in linen and NNX: each is written here, with its default.

A linen module inherits them as its attributes; it may not change, and so they are not frozen here. The constructor of
an NNX module takes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quaver.options import pick
from quaver.recipes.spec import Recipe

Initializer = Callable[..., Any]

KERNEL_INIT: Initializer = jax.nn.initializers.lecun_normal()


@dataclass(kw_only=True)
class DenseOptions:
    """Of every linear layer in a module."""

    use_bias: bool = True
    # Of the computation; None promotes the input's and the kernel's.
    dtype: DTypeLike | None = None
    # Of the parameters.
    param_dtype: DTypeLike = jnp.float32
    # They see a kernel as a matrix, so that fan-in is what it is.
    kernel_init: Initializer = KERNEL_INIT
    bias_init: Initializer = jax.nn.initializers.zeros
    # Name or Recipe that a layer always uses; None takes the ambient one.
    recipe: str | Recipe | None = None
    # Of stochastic rounding.
    seed: int = 0


@dataclass(kw_only=True)
class PartOptions(DenseOptions):
    """Of a module made of several linear layers."""

    # Name the kernels' axes, for sharding by logical names.
    partition: bool = False


@dataclass(kw_only=True)
class MLPOptions(PartOptions):
    """Of two linear layers with an activation between them."""

    # Features of the output; None keeps the input's.
    out: int | None = None


@dataclass(kw_only=True)
class NormOptions:
    """Of the normalization before a layer."""

    # "LayerNorm" or "RMSNorm".
    normalization: str = "LayerNorm"
    # Added to the variance.
    eps: float = 1e-6
    # Multiply by 1 + scale.
    zero_centered: bool = False


@dataclass(kw_only=True)
class CoreOptions:
    """Of `quaver.jax.blocks.attention.attention`."""

    mask_type: str = "none"
    window: tuple[int, int] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    # Of the probabilities.
    dropout: float = 0.0
    recipe: str | Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The options of `rope` that a layer keeps."""

    # Base of the frequencies.
    theta: float = 10_000.0
    # Of each head's features that turn, the first ones.
    fraction: float = 1.0
    # Pairs are neighbours; else feature i goes with i + half.
    interleaved: bool = False


@dataclass(kw_only=True)
class AttentionOptions(CoreOptions, PartOptions):
    """Of attention with its projections."""

    # Heads of keys and values, each shared by heads / groups query heads; None gives each its own.
    groups: int | None = None
    # Features of a head; None divides the input's among the heads.
    head_dim: int | None = None
    # One projection `qkv` (with a memory: `query` and `kv`); else `query`, `key` and `value`.
    fused: bool = True
    # Rotary positions of queries and keys; None has none.
    rope: Rope | None = None
    # "RMSNorm" or "LayerNorm" over each head's features of queries and keys; None has none.
    qk_norm: str | None = None
    # Turn first.
    qk_norm_after_rope: bool = False


@dataclass(kw_only=True)
class TransformerOptions(AttentionOptions, NormOptions):
    """Of a whole layer."""

    # Of the MLP: a row of `quaver.jax.blocks.layers.ACTIVATIONS`.
    activation: str = "gelu"
    # Normalize after adding, else before each part.
    post_norm: bool = False
    # Attention and MLP read the same normalized input and are added at once.
    parallel: bool = False
    mask_type: str = "causal"
    # Of the attention to a memory.
    cross_mask_type: str = "none"
    # Of each part's output; attention_dropout is that of the probabilities.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    # Probability of leaving a part out of a sample.
    drop_path: float = 0.0


def of_self_attention(layer: Any) -> dict[str, Any]:
    """What a Transformer layer's attention takes of its options."""
    return pick(AttentionOptions, layer) | {"dropout": layer.attention_dropout}


def of_cross_attention(layer: Any) -> dict[str, Any]:
    """What its attention to a memory takes, where positions, distances and norms of heads have no part."""
    plain = {name: getattr(AttentionOptions, name) for name in ("window", "rope", "qk_norm", "qk_norm_after_rope")}
    return of_self_attention(layer) | plain | {"mask_type": layer.cross_mask_type}
