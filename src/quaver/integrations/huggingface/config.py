"""What `from_pretrained(..., quantization_config=)` is given, and what a folder's config.json says of its recipe."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from quaver import recipes
from quaver.core.converting.rules import Rule, Rules
from quaver.core.spec import Recipe

#: The name of the method. transformers shows it where it does not know it, so it says what to import.
METHOD = "quaver, by import quaver.integrations.huggingface"
#: How weights are kept.
WEIGHTS = ("high", "stored")


@register_quantization_config(METHOD)
class QuaverConfig(QuantizationConfigMixin):
    """A recipe for a model of transformers, as a quantization config.

    Args:
        recipe: the name of a recipe, or rules {pattern: name or None}, the first match wins.
        options: of the recipe function, such as {"history": 16}; only with a name.
        skip: patterns of names to leave alone, as of `quaver.torch.convert`.
        head: True converts output heads too.
        seed: of stochastic rounding.
        blocks: True has our blocks compute norms and MLPs in place, as of `quaver.torch.convert`.
        weights: "high" keeps them as they are, to train; "stored" turns them into codes, as `quantize_weights` does.
        quant_method: written into folders; leave it out.
    Raises:
        ValueError: an unknown recipe or option, a `Recipe` in place of a name, another way to keep weights.
    """

    def __init__(
        self,
        recipe: str | Mapping[str, str | None] | Iterable[tuple[str, str | None]] = "tensorwise",
        *,
        options: Mapping[str, Any] | None = None,
        skip: Iterable[str] = (),
        head: bool = False,
        seed: int = 0,
        blocks: bool = False,
        weights: str = "high",
        quant_method: str = METHOD,
    ) -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights is {weights!r}; give 'high' to train them, or 'stored' to keep codes alone")
        if not isinstance(blocks, bool):
            raise ValueError(f"blocks is {blocks!r}; give True or False: a folder keeps no options of blocks")
        if isinstance(skip, str):
            raise ValueError(f"skip is {skip!r}; give a list of patterns, such as [{skip!r}]")
        self.quant_method: Any = quant_method
        # A folder's JSON has its names sorted, and the order of rules counts: they are a list.
        self.recipe = recipe if isinstance(recipe, str) else [list(rule) for rule in _pairs(recipe)]
        self.options = dict(options or {})
        self.skip, self.head, self.seed, self.blocks, self.weights = list(skip), head, seed, blocks, weights
        self.rules()

    def rules(self) -> Recipe | Rules:
        """What `quaver.torch.convert` takes."""
        if isinstance(self.recipe, str):
            return recipes.get(self.recipe, **self.options)
        if self.options:
            raise ValueError(f"options {sorted(self.options)} are of one recipe, and these are rules; leave them out")
        return Rules([Rule(pattern=p, recipe=None if name is None else recipes.get(name)) for p, name in self.recipe])


def _pairs(recipe: Any) -> list[Any]:
    if isinstance(recipe, Recipe):
        raise ValueError(
            f"a folder keeps a recipe by name and options, not the Recipe: give QuaverConfig({recipe.name!r}, "
            "options={...})"
        )
    pairs = list(recipe.items() if isinstance(recipe, Mapping) else recipe)
    for _, name in pairs:
        if isinstance(name, Recipe):
            return _pairs(name)
    return pairs
