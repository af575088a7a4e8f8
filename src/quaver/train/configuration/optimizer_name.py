"""Optimizers as a user types them.

adamw              torch's fused AdamW, all in float32
PRESET             AdamW over a row of `quaver.core.states.presets.PRESETS`: lean, balanced, exact, ...
RULE-PRESET        another rule over it: lion-lean, sgd-balanced, adam-exact, muon-lean
RULE               that rule with states in float32: lion, sgd, adam, muon

Muon steps the matrices of layers, and AdamW the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quaver.core.spec import Recipe
from quaver.core.states.footprint import SMALL
from quaver.core.states.presets import PRESETS, Preset
from quaver.core.text.spelling import suggest

#: What a run has where nothing else is asked for.
TORCH = "adamw"
#: By rule, how many moments a matrix of a layer has.
RULES = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1, "muon": 1}
#: Formats whose codes are a parameter that takes a gradient.
EIGHT_BITS = ("e4m3", "e5m2")
#: Matrices of a layer whose columns tensor parallelism divides.
ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Chosen:
    """An optimizer by its rule and its preset; without a preset it is torch's fused AdamW."""

    rule: str
    preset: Preset | None

    def weights(self, recipe: Recipe, dtype: str, codes: bool = True) -> str:
        """What matrices between embedding and head are kept as: "codes", "bfloat16" or "float32".

        Args:
            dtype: of the run; bfloat16 is that of weights under autocast alone.
            codes: whether they may be codes, which are of one recipe, and whose rows alone ranks divide: see
                `may_be_codes`.
        """
        kept = "float32" if self.preset is None else self.preset.weights
        if kept == "codes" and codes and recipe.quantizes and not _why_no_codes(recipe):
            return kept
        return "float32" if dtype == "float32" else self.others(dtype)

    @property
    def moments(self) -> tuple[int, int]:
        """How many moments a matrix of a layer has, and how many anything else."""
        own = RULES[self.rule]
        return own, 2 if self.rule == "muon" else own

    def others(self, dtype: str) -> str:
        """What other matrices are kept as, such as the head's: "bfloat16" or "float32"."""
        narrow = self.preset is not None and self.preset.weights != "float32" and dtype == "bfloat16"
        return "bfloat16" if narrow else "float32"


def find(text: str) -> Chosen:
    """The optimizer that a text names. Raises: ValueError, with a suggestion, if there is none."""
    if text == TORCH:
        return Chosen(TORCH, None)
    rule, _, name = text.partition("-")
    if rule in RULES and (name or rule != TORCH):
        name = name or ("" if text.endswith("-") else "float32")
    elif not name:
        rule, name = TORCH, text
    if rule in RULES and name in PRESETS:
        return Chosen(rule, PRESETS[name])
    known = [*RULES, *PRESETS, *(f"{rule}-{preset}" for rule in RULES for preset in PRESETS)]
    raise ValueError(f"optimizer {text[:100]!r} is not known; {suggest(text[:100], known)}")


def check(text: str, recipe: Recipe) -> None:
    """Raise a ValueError if the weights of a run's one recipe cannot be kept as the optimizer keeps them."""
    preset = find(text).preset
    if preset is None or preset.weights != "codes" or not recipe.quantizes:
        return
    why = _why_no_codes(recipe)
    if why:
        raise ValueError(
            f"optimizer {text} keeps weights as codes of eight bits, and recipe {recipe} {why}; take a recipe with "
            "weights in eight bits, such as tensorwise or mxfp8, or --optimizer exact"
        )


def may_be_codes(recipes: int, tp: int) -> bool:
    """Whether a run's matrices may be codes.

    Args:
        recipes: of the run, one after the other.
        tp: ranks of tensor parallelism, which takes weights that are floats.
    """
    return recipes == 1 and tp == 1


def _why_no_codes(recipe: Recipe) -> str:
    """Why a recipe that quantizes has no codes of weights that a gradient steps, or ""."""
    spec = recipe.fprop.b
    if spec is None:
        return "quantizes no weight"
    return "" if spec.format.name in EIGHT_BITS else f"has weights in {spec.format}, which take no gradient"


def check_parts(text: str, shapes: Mapping[str, tuple[int, ...]], parts: int, tp: int) -> None:
    """Raise a ValueError if ranks cannot step their parts of matrices by themselves.

    Args:
        shapes: [out, in] of the layers' matrices, by name; of experts [experts, out, in].
        parts: ranks that have parts of each matrix.
        tp: of those the ranks of tensor parallelism.
    """
    chosen = find(text)
    preset, lies = chosen.preset, f"{parts} ranks have parts of each matrix"
    if preset is None or parts == 1:
        return
    if chosen.rule == "muon":
        raise ValueError(
            f"optimizer {text} orthogonalizes whole matrices, and {lies}; have ranks share layers alone (--pp), or "
            "take --optimizer lean or lion-lean"
        )
    specs = [spec for spec in (preset.first, preset.second)[: chosen.moments[0]] if spec.of.scaled]
    if any(spec.block is None for spec in specs):
        raise ValueError(
            f"optimizer {text} has one scale for a whole matrix, and {lies}; take one with scales of blocks: lean, "
            "balanced or exact"
        )
    block = max((spec.block or 1 for spec in specs), default=1)
    for name, (*first, columns) in shapes.items():
        rows = math.prod(first)
        divided = tp > 1 and name.endswith(ROWS) and rows * columns >= SMALL
        if divided and columns % (block * tp):
            raise ValueError(
                f"tp is {tp}, which divides the {columns} columns of {name}, and optimizer {text} has a scale for each "
                f"{block}; give --tp a smaller number, or take --optimizer exact"
            )
