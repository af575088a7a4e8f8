"""linen and NNX have the same options, and suggest the nearest one for a misspelt one."""

import inspect
from typing import Any

import pytest
from flax import nnx

import quaver.jax.linen as ql
import quaver.jax.nnx as qn

#: The modules of both front ends that have options, with the required arguments of their constructors.
MODULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DenseGeneral": ({"features": 8}, {"in_features": 8, "features": 8}),
    "LayerNormDenseGeneral": ({"features": 8}, {"in_features": 8, "features": 8}),
    "MLP": ({"hidden": 8}, {"in_features": 8, "hidden": 8}),
    "LayerNormMLP": ({"hidden": 8}, {"in_features": 8, "hidden": 8}),
    "DotProductAttention": ({}, {}),
    "MultiHeadAttention": ({"heads": 2}, {"in_features": 8, "heads": 2}),
    "TransformerLayer": ({"heads": 2, "hidden": 8}, {"features": 8, "heads": 2, "hidden": 8}),
}
#: Options of only one front end: NNX needs its sizes, and linen has its own names and collections.
OWN = {"in_features", "memory_features", "features", "kernel_metadata", "bias_metadata", "rngs", "name"}
OWN |= {"parent", "axis", "cross_attention", "self", "heads"}


def defaults(kind: type) -> dict[str, Any]:
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: parameter.default for name, parameter in parameters.items() if name not in OWN}


@pytest.mark.parametrize("name", MODULES)
def test_both_flavours_take_the_same_options_with_the_same_defaults(name: str) -> None:
    linen, own = defaults(getattr(ql, name)), defaults(getattr(qn, name))
    assert linen == own
    assert {"recipe"} <= set(linen)


@pytest.mark.parametrize("name", MODULES)
def test_a_misspelt_option_suggests_the_nearest(name: str) -> None:
    linen_options, nnx_options = MODULES[name]
    with pytest.raises(TypeError, match=f"^{name} has no option 'recip'; did you mean 'recipe'"):
        getattr(ql, name)(**linen_options, recip="mxfp8")
    with pytest.raises(TypeError, match=f"^{name} has no option 'recip'; did you mean 'recipe'"):
        getattr(qn, name)(**nnx_options, recip="mxfp8", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_suggest_the_nearest_too(name: str) -> None:
    for kind, sizes in ((getattr(ql, name), ()), (getattr(qn, name), (8,))):
        with pytest.raises(TypeError, match=f"^{name} has no option 'epz'; did you mean 'eps'"):
            kind(*sizes, epz=1e-5)


def test_an_option_by_position_does_not_become_flax_parent() -> None:
    with pytest.raises(
        TypeError, match=r"^MLP: too many positional arguments; give all but hidden, activation by name$"
    ):
        ql.MLP(8, "gelu", True)  # type: ignore[arg-type]
    assert ql.MLP(8, "gelu", name="mlp", parent=None).name == "mlp"
