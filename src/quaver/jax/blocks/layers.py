"""Activations, norms, the MLP and the residual stream as functions of arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.linears.dot_general import KernelMatrix
from quaver.jax.numerics.quantized import array
from quaver.recipes.text import check_name

# ---- activations: add a row to the table for a new one ----
#
# A gated activation takes two arrays: the gate, which passes through the nonlinearity, and the value that it
# multiplies.
# Source of the gated ones: Shazeer 2020, arXiv:2002.05202.


@dataclass(frozen=True)
class Activation:
    """A function of one array, or of gate and value."""

    function: Callable[..., Array]
    gated: bool = False

    @property
    def inputs(self) -> int:
        """Number of input arrays, each as wide as the result."""
        return 2 if self.gated else 1


def quick_gelu(x: Array) -> Array:
    """Compute x sigmoid(1.702 x), CLIP's approximation of gelu."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Array) -> Array:
    """Compute max(x, 0)², of Primer (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def clamped_swiglu(gate: Array, value: Array, limit: float = 7.0, alpha: float = 1.702) -> Array:
    """Compute gpt-oss's activation: gate sigmoid(alpha gate) (value + 1), gate clamped to ≤ limit, value to ±limit."""
    gate = jnp.minimum(gate, limit)
    value = jnp.clip(value, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (value + 1)


def _gated(function: Callable[[Array], Array]) -> Activation:
    return Activation(lambda gate, value: function(gate) * value, gated=True)


def _gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


#: "gelu" is the tanh approximation, as in JAX and Flax; "gelu_exact" uses the error function.
ACTIVATIONS: dict[str, Activation] = {
    "linear": Activation(lambda x: x),
    "gelu": Activation(jax.nn.gelu),
    "gelu_exact": Activation(_gelu_exact),
    "quick_gelu": Activation(quick_gelu),
    "relu": Activation(jax.nn.relu),
    "squared_relu": Activation(squared_relu),
    "silu": Activation(jax.nn.silu),
    "glu": _gated(jax.nn.sigmoid),
    "geglu": _gated(jax.nn.gelu),
    "geglu_exact": _gated(_gelu_exact),
    "quick_geglu": _gated(quick_gelu),
    "reglu": _gated(jax.nn.relu),
    "squared_reglu": _gated(squared_relu),
    "swiglu": _gated(jax.nn.silu),
    "clamped_swiglu": Activation(clamped_swiglu, gated=True),
}


def get_activation(name: str) -> Activation:
    """Return the activation of this name.

    Raises:
        ValueError: unknown name; the message names the closest match.
    """
    check_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def activate(name: str, *x: Array, **options: Any) -> Array:
    """Apply an activation in float32.

    Args:
        name: a name in `ACTIVATIONS`.
        x: one array, or gate and value of the same shape for a gated activation.
        options: options of the activation, such as clamped_swiglu's `limit`.
    Returns:
        An array of the shape and dtype of x.
    Raises:
        ValueError: unknown name, or a wrong number of arrays.
    Bounded: relative RMS 1e-6 of float64 in float32. NaN gives NaN.
    """
    row = get_activation(name)
    if len(x) != row.inputs:
        raise ValueError(f"activation {name!r} takes {row.inputs} array{'s' * row.gated}, and got {len(x)}")
    x = tuple(array(f"activation {name!r}", "x", a) for a in x)
    return row.function(*(a.astype(jnp.float32) for a in x), **options).astype(x[0].dtype)


# ---- LayerNorm and RMSNorm over the last axis, computed in float32 for every dtype ----

T = TypeVar("T")


def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6, zero_centered: bool = False
) -> Array:
    """Layer normalization: (x - mean) / sqrt(variance + eps) * scale + bias.

    Args:
        x: [..., d].
        scale: [d], also called gamma; None multiplies by one.
        bias: [d], also called beta; None adds nothing.
        eps: added to the variance.
        zero_centered: multiply by 1 + scale, so that a scale of 0 has no effect.
    Returns:
        [..., d] in x's dtype, rounded once.
    Raises:
        ValueError: scale or bias is not [d].
    Bounded: relative RMS 1e-6 of float64 in float32. NaN and infinities make their row NaN.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    x = array("layer_norm", "x", x)
    _check(x, scale=scale, bias=bias)
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return _finish(x, centred, scale, bias, eps, zero_centered)


def rms_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6, zero_centered: bool = False
) -> Array:
    """RMS normalization: x / sqrt(mean(x²) + eps) * scale; arguments and result as for `layer_norm`.

    Bounded: relative RMS 1e-6 of float64 in float32.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467; the zero-centred scale is Gemma's.
    """
    x = array("rms_norm", "x", x)
    _check(x, scale=scale, bias=bias)
    return _finish(x, x.astype(jnp.float32), scale, bias, eps, zero_centered)


#: Normalization functions by the name that modules take.
NORMALIZATIONS = {"LayerNorm": layer_norm, "RMSNorm": rms_norm}


def normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Array:
    """Apply the normalization of this name."""
    return named(normalization, NORMALIZATIONS)(x, scale, bias, eps=eps, zero_centered=zero_centered)


def named(normalization: str, kinds: Mapping[str, T]) -> T:
    """Return the function or module of a normalization by its name.

    Raises:
        ValueError: unknown name.
    """
    if normalization not in kinds:
        raise ValueError(f"normalization is {normalization!r}; give one of {', '.join(map(repr, kinds))}")
    return kinds[normalization]


def _finish(
    x: Array, centred: Array, scale: Array | None, bias: Array | None, eps: float, zero_centered: bool
) -> Array:
    y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    if scale is not None:
        y = y * (scale.astype(jnp.float32) + (1.0 if zero_centered else 0.0))
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _check(x: Array, **vectors: Array | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"the norm's {name} has shape {vector.shape}, and x {x.shape} needs {x.shape[-1:]}")


# ---- MLP of a Transformer: linear layer, activation, linear layer ----
#
# Gate and value of a gated activation come from one GEMM, interleaved: wi is [d, hidden, 2], so that a mesh axis can
# shard `hidden` without separating a pair.


def hidden_features(activation: str, hidden: int) -> tuple[int, ...]:
    """Return the output features of wi: (hidden,), or (hidden, 2) for a gated activation."""
    return (hidden, 2) if get_activation(activation).gated else (hidden,)


def matrices(activation: str, hidden: int, out: int) -> dict[str, KernelMatrix]:
    """Return the matrices wi and wo of an MLP by name."""
    features = hidden_features(activation, hidden)
    inner: tuple[str | None, ...] = ("mlp", None)[: len(features)]
    return {"wi": KernelMatrix(features, ("embed", *inner)), "wo": KernelMatrix((out,), ("mlp", "embed"))}


def activate_fused(activation: str, h: Array, features: int = 1, **options: Any) -> Array:
    """Apply an activation to the output of wi: [..., hidden], or [..., hidden, 2] for a gated one (features=2)."""
    gated = get_activation(activation).gated
    if features != 1 + gated:
        wanted = "[d, hidden, 2], gate and value," if gated else "[d, hidden]"
        raise ValueError(f"activation {activation!r} needs a first matrix {wanted} and got one of {features + 1} axes")
    return activate(activation, h[..., 0], h[..., 1], **options) if gated else activate(activation, h, **options)


# ---- residual stream of a Transformer layer, and drop path ----

Part = Callable[[Array], Array]


def residual(
    x: Array,
    parts: Sequence[Part],
    norms: Sequence[Part],
    drop: Part,
    *,
    post_norm: bool = False,
    parallel: bool = False,
) -> Array:
    """Add each part's output to x, one after the other or in parallel.

    Args:
        x: [B, S, d].
        parts: attention, cross attention, MLP: functions of [B, S, d].
        norms: one per part; a single one if parallel.
        drop: function applied to a part's output before it is added.
        post_norm: True for norm(x + part(x)) as in Vaswani et al. 2017; False for x + part(norm(x)).
        parallel: True for x + sum of part(norm(x)), as in GPT-J and Falcon.
    """
    if parallel:
        h = norms[0](x)
        return x + drop(sum((part(h) for part in parts[1:]), parts[0](h)))
    for part, norm in zip(parts, norms, strict=True):
        x = norm(x + drop(part(x))) if post_norm else x + drop(part(norm(x)))
    return x


def drop_path(x: Array, rate: float, key: Array) -> Array:
    """Drop a part's output for whole samples, and scale the rest by 1 / (1 - rate).

    Args:
        x: [B, ...].
        rate: probability of dropping a sample.
        key: jax.random key.

    Statistical. Source: Huang et al. 2016, arXiv:1603.09382.
    """
    keep_mask = jax.random.bernoulli(key, 1 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
    return jnp.where(keep_mask, x / (1 - rate), 0).astype(x.dtype)
