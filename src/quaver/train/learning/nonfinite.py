"""The error that stops a run whose numbers are no longer finite."""


class NonFiniteError(ValueError):
    """A loss or gradient that is not finite; nothing was written over."""
