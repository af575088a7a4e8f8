"""`convert` and `plain_state` for models of linen, NNX and Equinox."""

from collections.abc import Mapping
from typing import Any

from quaver.recipes.conversion import ConversionReport, Rules, Skip
from quaver.recipes.spec import Recipe


def convert(
    model: Any,
    recipe: str | Recipe | Rules | Mapping[str, Recipe | str | None],
    *,
    skip: Skip = (),
    head: bool = False,
    seed: int = 0,
    uses: int | Mapping[str, int] = 1,
) -> tuple[Any, ConversionReport]:
    """Run the linear layers of a model under recipes.

    Args:
        model: a linen, NNX or Equinox module.
        recipe, skip, head, seed, uses: as for `quaver.jax.linen.convert`.
    Returns:
        The model to use, and a report. An NNX model is changed in place. A linen model is wrapped, and its report is
        complete when `init` or `apply` was traced. An Equinox model is copied.
    Raises:
        TypeError: the model is of none of these classes.
        ValueError: an unknown recipe, or one that quantizes attention.
    """
    options: dict[str, Any] = {"skip": skip, "head": head, "seed": seed, "uses": uses}
    framework = _framework_of(model)
    if framework == "linen":
        from quaver.jax import linen

        return linen.convert(model, recipe, **options)
    if framework == "nnx":
        from quaver.jax import nnx

        return model, nnx.convert(model, recipe, **options)
    if framework == "equinox":
        from quaver.jax import equinox

        return equinox.convert(model, recipe, **options)
    raise TypeError(
        f"convert takes a linen, NNX or Equinox module, not a {type(model).__name__}; call quaver.jax.linear or "
        "quaver.jax.dot_general in functions of your own"
    )


def plain_state(model: Any) -> Any:
    """Return the parameters of a model without the state of recipes, to save, publish or load into a plain model.

    Args:
        model: the variables of a linen model (a dict of collections), an NNX model, or an Equinox model.
    Returns:
        The variables without the collection of states; the `nnx.State` of the unconverted model; or the Equinox model
        with eqx.nn.Linear in place of converted layers.
    """
    framework = _framework_of(model)
    if framework == "nnx":
        from quaver.jax import nnx

        return nnx.plain_state(model)
    if framework == "equinox":
        from quaver.jax import equinox

        return equinox.revert(model)
    if isinstance(model, Mapping):
        from quaver.jax.linen.dense import COLLECTION

        return {name: collection for name, collection in model.items() if name != COLLECTION}
    raise TypeError(
        f"plain_state takes the variables of a linen model, an NNX model or an Equinox model, not a "
        f"{type(model).__name__}"
    )


def _framework_of(model: Any) -> str:
    """Return the framework whose module class a model is an instance of, or ""; imports none of them."""
    bases = {(base.__module__.partition(".")[0], base.__module__, base.__name__) for base in type(model).__mro__}
    if any(package == "flax" and name == "Module" and "linen" in module for package, module, name in bases):
        return "linen"
    if any(package == "flax" and name == "Module" and "nnx" in module for package, module, name in bases):
        return "nnx"
    return "equinox" if any(package == "equinox" and name == "Module" for package, _, name in bases) else ""
