"""Options of the Flax modules with their defaults, shared by linen and NNX.

A linen module inherits them as attributes and may not change, so they are not frozen here. An NNX module's constructor
takes them.
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
    """Options of every linear layer in a module."""

    use_bias: bool = True
    # Dtype of the computation; None promotes the input's and the kernel's.
    dtype: DTypeLike | None = None
    # Dtype of the parameters.
    param_dtype: DTypeLike = jnp.float32
    # Initializers; they see a kernel as a matrix, so that fan-in is correct.
    kernel_init: Initializer = KERNEL_INIT
    bias_init: Initializer = jax.nn.initializers.zeros
    # Name or Recipe that the layer always uses; None uses the ambient one.
    recipe: str | Recipe | None = None
    # Seed of stochastic rounding.
    seed: int = 0
    # Number of calls in one step; recipes with state need to know it.
    uses: int = 1


@dataclass(kw_only=True)
class PartOptions(DenseOptions):
    """Options of a module with several linear layers."""

    # Name the kernels' axes, for sharding by logical names.
    partition: bool = False


@dataclass(kw_only=True)
class MLPOptions(PartOptions):
    """Options of an MLP: two linear layers with an activation between them."""

    # Features of the output; None uses the input's.
    out: int | None = None


@dataclass(kw_only=True)
class NormOptions:
    """Options of the normalization in front of a layer."""

    # "LayerNorm" or "RMSNorm".
    normalization: str = "LayerNorm"
    # Added to the variance.
    eps: float = 1e-6
    # Multiply by 1 + scale.
    zero_centered: bool = False


@dataclass(kw_only=True)
class CoreOptions:
    """Options of `quaver.jax.blocks.attention.attention`."""

    mask_type: str = "none"
    window: tuple[int, int] | None = None
    chunk: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    # None, "off_by_one" or "learnable".
    sinks: str | None = None
    # Lower scores with distance, by slopes 2^(-8 h / heads).
    alibi: bool = False
    # Dropout of the attention probabilities.
    dropout: float = 0.0
    # Mesh axis of a shard_map that shards the tokens; keys and values then travel around a ring.
    context_axis: str | None = None
    recipe: str | Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Options of a layer's rotary embedding; see `rope`."""

    # Base of the frequencies.
    theta: float = 10_000.0
    # Share of each head's features that rotates, the first ones.
    fraction: float = 1.0
    # True pairs neighbours; False pairs feature i with i + half.
    interleaved: bool = False


@dataclass(kw_only=True)
class AttentionOptions(CoreOptions, PartOptions):
    """Options of attention and its projections."""

    # Number of key/value heads, each shared by heads / groups query heads; None for one per query head.
    groups: int | None = None
    # Features of a head; None divides the input's by the heads.
    head_dim: int | None = None
    # True for one projection `qkv` (with a memory: `query` and `kv`); False for `query`, `key` and `value`.
    fused: bool = True
    # Rotary embedding of queries and keys, or None.
    rope: Rope | None = None
    # "RMSNorm" or "LayerNorm" over each head's features of queries and keys, or None.
    qk_norm: str | None = None
    # Apply these norms after rope.
    qk_norm_after_rope: bool = False


@dataclass(kw_only=True)
class TransformerOptions(AttentionOptions, NormOptions):
    """Options of a Transformer layer."""

    # Activation of the MLP: a name in `quaver.jax.blocks.layers.ACTIVATIONS`.
    activation: str = "gelu"
    # True normalizes after adding, False before each part.
    post_norm: bool = False
    # Attention and MLP read the same normalized input, and both outputs are added.
    parallel: bool = False
    mask_type: str = "causal"
    # Mask type of the cross attention.
    cross_mask_type: str = "none"
    # Dropout of each part's output, and of the attention probabilities.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    # Probability of dropping a part's output for a sample.
    drop_path: float = 0.0


def of_self_attention(layer: Any) -> dict[str, Any]:
    """Return the options of a Transformer layer's self attention."""
    return pick(AttentionOptions, layer) | {"dropout": layer.attention_dropout}


def of_cross_attention(layer: Any) -> dict[str, Any]:
    """Return the options of a Transformer layer's cross attention, without positions, distances, sinks and head
    norms.
    """
    names = ("window", "chunk", "sinks", "alibi", "context_axis", "rope", "qk_norm", "qk_norm_after_rope")
    plain = {name: getattr(AttentionOptions, name) for name in names}
    return of_self_attention(layer) | plain | {"mask_type": layer.cross_mask_type}
