"""Arrays that no derivative may go through: where rounding would pass for a constant, or for the identity."""

from functools import partial
from typing import Any

from jax.custom_derivatives import custom_jvp


@partial(custom_jvp, nondiff_argnums=(0,))
def constant(sentence: str, tree: Any) -> Any:
    """The same arrays. A derivative with respect to one, in either mode, is a NotImplementedError of this sentence."""
    return tree


@constant.defjvp
def _refuse(sentence: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(sentence)
