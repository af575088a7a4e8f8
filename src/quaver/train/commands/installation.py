"""Check for the packages that the trainer needs, to report missing ones in one sentence instead of a traceback."""

from importlib.util import find_spec

NEEDED = ("filelock", "matplotlib", "rich", "safetensors", "tokenizers", "typer")


def missing_packages() -> str:
    """Return a sentence with the install command if packages are missing, else ""."""
    names = [name for name in NEEDED if find_spec(name) is None]
    if not names:
        return ""
    return (
        f"quaver's commands need {', '.join(names)}, not installed here: pip install 'quaver[train]' "
        "(or 'quaver[train-jax]', without PyTorch)"
    )
