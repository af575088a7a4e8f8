"""The activations that an MLP applies between its two matrices, as a table: a new activation is a new row.

A gated one takes two arrays, the gate that passes through the nonlinearity and the value that it multiplies.
Source of the gated ones: Shazeer 2020, arXiv:2002.05202.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.core.text.spelling import check_name
from quaver.jax.numerics.given import array


@dataclass(frozen=True)
class Activation:
    """A function of one array, or of gate and value."""

    function: Callable[..., Array]
    gated: bool = False

    @property
    def inputs(self) -> int:
        """How many arrays it takes, each as wide as its result."""
        return 2 if self.gated else 1


def quick_gelu(x: Array) -> Array:
    """x sigmoid(1.702 x): CLIP's approximation of gelu."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Array) -> Array:
    """max(x, 0)², of Primer (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def clamped_swiglu(gate: Array, value: Array, limit: float = 7.0, alpha: float = 1.702) -> Array:
    """gpt-oss's: gate held below `limit`, value within ±limit; gate sigmoid(alpha gate) (value + 1)."""
    gate = jnp.minimum(gate, limit)
    value = jnp.clip(value, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (value + 1)


def _gated(function: Callable[[Array], Array]) -> Activation:
    return Activation(lambda gate, value: function(gate) * value, gated=True)


def _gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


#: "gelu" is the tanh form, as it is in JAX and Flax; "gelu_exact" is the error function's.
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
    """The row of this name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    check_name("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def activate(name: str, *x: Array, **options: Any) -> Array:
    """Apply an activation in float32.

    Args:
        name: a row of `ACTIVATIONS`.
        x: one array, or gate and value of one shape for a gated activation.
        options: of the function, such as clamped_swiglu's `limit`.
    Returns:
        An array of the shape and dtype of x.
    Raises:
        ValueError: unknown name, or another number of arrays than it takes.
    Bounded: relative RMS 1e-6 of float64 in float32. NaN gives NaN.
    """
    row = get_activation(name)
    if len(x) != row.inputs:
        raise ValueError(f"activation {name!r} takes {row.inputs} array{'s' * row.gated}, and got {len(x)}")
    x = tuple(array(f"activation {name!r}", "x", a) for a in x)
    return row.function(*(a.astype(jnp.float32) for a in x), **options).astype(x[0].dtype)
