"""What users hand to a function, looked at before a framework does: what does not fit is told in a sentence."""


def instance(where: str, what: str, value: object, kind: type, example: str) -> None:
    """Refuse what is not of a type. Raises: TypeError that names an example."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {what} is a {type(value).__name__}; give a {kind.__name__}, such as {example}")


def shown(value: object) -> str:
    """A value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
