"""State of recipes between steps as plain pytrees, and the recipe in force.

The functions are documented in `quaver.jax.state.buffers`: `init`, `split`, `join`, `merge` and others.
"""

from quaver.jax.state.buffers import (
    MOST_COUNTED,
    State,
    amaxes_of,
    check,
    check_state,
    columns,
    init,
    is_state,
    join,
    merge,
    micro_batch,
    per_layer,
    record,
    roll,
    rolled_and_checked,
    share,
    split,
    unless_overrun,
    unrecorded,
    update,
    use,
)

__all__ = [
    "MOST_COUNTED",
    "State",
    "amaxes_of",
    "check",
    "check_state",
    "columns",
    "init",
    "is_state",
    "join",
    "merge",
    "micro_batch",
    "per_layer",
    "record",
    "roll",
    "rolled_and_checked",
    "share",
    "split",
    "unless_overrun",
    "unrecorded",
    "update",
    "use",
]
