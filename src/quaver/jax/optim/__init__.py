"""Optax gradient transformations with moments in 8 or 16 bits, bit-compatible with `quaver.torch.optim`."""

from importlib.util import find_spec

if find_spec("optax") is None:
    sentence = "quaver.jax.optim needs optax, which is not installed: pip install 'quaver[flax]'"
    raise ModuleNotFoundError(sentence, name="optax")

from quaver.jax.optim.adamw import AdamWState, adamw, balanced, exact, lean
from quaver.reference.optimizer_state import PRESETS, Preset, StateSpec

__all__ = ["PRESETS", "AdamWState", "Preset", "StateSpec", "adamw", "balanced", "exact", "lean"]


def __dir__() -> list[str]:
    """Return only the public names."""
    return sorted(__all__)
