"""How many calls read one layer's state in one step: autodiff would add up the states that it returns for them.

A state that is traced is an object; the calls that get the same one are counted beside it, and a backward rule that is
about to be traced looks at the count. What is counted is not part of any computation, and goes when the object does.
"""

import weakref
from functools import partial
from typing import Any

import jax

_seen: "dict[int, tuple[weakref.ref[Any], Uses]]" = {}


class Uses:
    """How many calls read one state."""

    count = 0


def uses_of(state: Any) -> Uses:
    """Count one more call that reads this state."""
    leaf = next(iter(jax.tree.leaves(state)), None)
    if not isinstance(leaf, jax.core.Tracer):
        # A value is not what is differentiated.
        return Uses()
    known, uses = _seen.get(id(leaf), (None, None))
    if known is None or uses is None or known() is not leaf:
        uses = Uses()
        _seen[id(leaf)] = (weakref.ref(leaf, partial(_forget, id(leaf))), uses)
    uses.count += 1
    return uses


def _forget(key: int, ref: "weakref.ref[Any]") -> None:
    if key in _seen and _seen[key][0] is ref:
        del _seen[key]
