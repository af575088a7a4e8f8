"""What the trainer needs beyond the library: a sentence where it is missing, in place of a traceback."""

from importlib.util import find_spec

NEEDED = ("filelock", "matplotlib", "rich", "safetensors", "tokenizers", "typer")


def missing() -> str:
    """What to install; "" where everything is there."""
    names = [name for name in NEEDED if find_spec(name) is None]
    if not names:
        return ""
    return (
        f"quaver's commands need {', '.join(names)}, not installed here: pip install 'quaver[train]' "
        "(or 'quaver[train-jax]', without PyTorch)"
    )
