"""What users hand to a function, looked at before JAX does: what does not fit is told in a sentence."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def array(where: str, argument: str, value: Any) -> Array:
    """An array of real numbers, also from numpy or a Variable of NNX.

    Raises:
        TypeError: it is something else.
    """
    if hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{where}: {argument} is a {type(value).__name__}; give an array, such as jax.numpy.asarray({argument})"
        )
    real = jnp.issubdtype(value.dtype, np.number) and not jnp.issubdtype(value.dtype, np.complexfloating)
    if not real and value.dtype != np.bool_:
        raise TypeError(f"{where}: {argument} is an array of {value.dtype}; give one of real numbers")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def floating(where: str, dtype: Any) -> Any:
    """A floating dtype. Raises: ValueError where it is none."""
    try:
        own = None if isinstance(dtype, (jax.Array, np.ndarray)) else jnp.dtype(dtype)
    except (TypeError, ValueError):
        own = None
    if own is None or not jnp.issubdtype(own, jnp.floating):
        shown = repr(dtype) if own is None else own
        raise ValueError(f"{where} computes in a floating dtype, not {shown}; convert x, or give dtype=jnp.float32")
    return own


def state_of(where: str, state: Any) -> dict[str, Any]:
    """A layer's state as a dict of its own; {} for None. Raises: TypeError where it is none."""
    if state is None:
        return {}
    if not isinstance(state, Mapping) or not all(hasattr(leaf, "dtype") for leaf in state.values()):
        raise TypeError(
            f"{where}: state is a {type(state).__name__} and should be a dict of arrays, as "
            "quaver.jax.state.init(recipe) makes it and the state's gradient returns it"
        )
    return dict(state)
