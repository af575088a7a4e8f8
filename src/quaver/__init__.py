"""Train Transformers in FP8, MXFP8 and NVFP4: recipes, specs, formats and rules, which both front ends share.

Layers are in `quaver.torch` and `quaver.jax`; importing `quaver` imports neither torch nor jax.
"""

from quaver import recipes, rules
from quaver.recipes.conversion import ModuleRule, Rules
from quaver.recipes.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, Format
from quaver.recipes.spec import AttentionSpec, Delayed, GemmSpec, QuantSpec, Recipe

__version__ = "0.2.0"

__all__ = [
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "AttentionSpec",
    "Delayed",
    "Format",
    "GemmSpec",
    "ModuleRule",
    "QuantSpec",
    "Recipe",
    "Rules",
    "recipes",
    "rules",
]

#: Packages that users import themselves; each is listed once it is imported.
_FRONT_ENDS = ("jax", "torch", "train")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__", *(name for name in _FRONT_ENDS if name in globals())])
