"""Which linear layer of a model gets which recipe: the decision that `convert` makes for linen, NNX and Equinox."""

from collections.abc import Collection, Mapping

from quaver import recipes
from quaver.recipes.conversion import ConversionReport, ConversionRules, Rules, Skip, reason_head
from quaver.recipes.spec import Recipe


class LayerRules:
    """Rules of one `convert`, and its report.

    Args:
        recipe: a recipe or recipe name for all layers, or `Rules`, or the dict that `Rules` takes.
        skip: name patterns to leave alone, and filters.
        head: True converts the output head too.
    Raises:
        ValueError: an unknown recipe, or one that quantizes attention.
    """

    def __init__(
        self, recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None], skip: Skip, head: bool
    ) -> None:
        self._choice = ConversionRules(recipe, skip)
        rules = self._choice.rules.rules
        self._chosen = {rule: None if rule.recipe is None else recipes.get(rule.recipe) for rule in rules}
        for wanted in self._chosen.values():
            if wanted is not None and wanted.attention is not None:
                raise ValueError(
                    f"recipe {wanted.name!r} has attention=True, and convert sets the recipes of linear layers only; "
                    "use the recipe without it, or make the attention modules with recipe=..."
                )
        self._head = head
        self.report = ConversionReport(kind="linear")

    def decide(
        self, name: str, features: tuple[int, int], unsupported: str, vocabularies: Collection[int]
    ) -> Recipe | None:
        """Return a layer's recipe, or None to leave it alone; adds it to the report.

        Args:
            name: name of the layer with dots.
            features: numbers of its inputs and outputs.
            unsupported: why it cannot be converted, or "".
            vocabularies: sizes of the model's embeddings; a layer of this size with a usual name is the output head.
        """
        in_features, out_features = features
        rule, why = self._choice.decide([name], in_features, out_features)
        wanted = None if rule is None else self._chosen[rule]
        why = why or unsupported
        if not self._head and out_features in vocabularies:
            why = why or reason_head(name, rule)
        if wanted is not None:
            why = why or self._choice.refused(name, in_features, out_features, wanted)
        self.report.unused = self._choice.unused
        if why or wanted is None:
            self.report.skipped[name] = why
            return None
        self.report.converted[name] = wanted
        return wanted
