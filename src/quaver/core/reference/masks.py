"""The masks of attention, by the names that both front ends take."""

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
