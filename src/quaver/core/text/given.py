"""What users hand to a function, looked at before a framework does: what does not fit is told in a sentence."""


def instance(where: str, what: str, value: object, kind: type, example: str) -> None:
    """Refuse what is not of a type. Raises: TypeError that names an example."""
    if not isinstance(value, kind):
        raise TypeError(f"{where}: {what} is a {type(value).__name__}; give a {kind.__name__}, such as {example}")
