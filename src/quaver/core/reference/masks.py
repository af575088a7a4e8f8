"""What both front ends ask of attention: masks by name, what may be given with each, and heads that share."""

import numpy as np

from quaver.core.text.spelling import check_name

#: The masks by name, and whether each takes a `mask` and hides later keys.
MASKS = {
    "none": (False, False),
    "causal": (False, True),
    "causal_bottom_right": (False, True),
    "padding": (True, False),
    "padding_causal": (True, True),
    "padding_causal_bottom_right": (True, True),
    "arbitrary": (True, False),
}


def check_type(mask_type: str, given: bool) -> None:
    """Raise a ValueError unless there is a mask of this name, and one was given where it takes one."""
    check_name("mask type", mask_type, MASKS)
    takes_mask, _ = MASKS[mask_type]
    if takes_mask and not given:
        raise ValueError(f"mask_type {mask_type!r} needs a mask, True where masked out")
    if not takes_mask and given:
        raise ValueError(f"mask_type {mask_type!r} takes no mask; give 'arbitrary', or 'padding' for one of tokens")


def check_heads(heads: int, groups: int) -> None:
    """Raise a ValueError unless each of the `groups` heads of keys and values serves equally many query heads."""
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"{heads} query heads cannot share {groups} heads of keys and values evenly; "
            "make the first number a multiple of the second"
        )


def check_window(mask_type: str, window: tuple[int, int] | None) -> None:
    """Raise a ValueError unless the window is a pair of numbers of keys, none ahead of a causal query."""
    if window is None:
        return
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or any(not isinstance(w, int | np.integer) or w < -1 for w in window):
        raise ValueError(f"window is {window}; give (left, right), numbers of keys, -1 for no bound")
    if MASKS[mask_type][1] and window[1] > 0:
        raise ValueError(f"window {window} looks ahead, and {mask_type!r} hides what is ahead; give ({window[0]}, 0)")
