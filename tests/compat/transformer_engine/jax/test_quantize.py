"""Contexts and collections by Transformer Engine's names for JAX, and what there is not."""

import jax.numpy as jnp
import pytest
from flax.core import FrozenDict, freeze

import quaver.compat.transformer_engine.jax as te
from quaver import recipes
from quaver.compat.transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from quaver.jax.state.context import recipe_in_force


def test_a_context_is_off_by_default() -> None:
    with te.autocast():
        assert recipe_in_force("mxfp8") is None
    with te.autocast(enabled=True):
        own = recipe_in_force()
        assert own is not None and own.name == "transformer_engine.DelayedScaling"
    with te.fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
        own = recipe_in_force()
        assert own is not None and own.fprop == recipes.mxfp8().fprop
        with te.autocast(enabled=False):
            assert recipe_in_force() is None
    assert recipe_in_force() is None


def test_a_context_decorates_a_function() -> None:
    @te.autocast(enabled=True, recipe=MXFP8BlockScaling())
    def named() -> str:
        own = recipe_in_force()
        return "" if own is None else own.name

    assert named() == named() == "transformer_engine.MXFP8BlockScaling"


def test_options_that_are_not_there_are_refused_by_name() -> None:
    assert te.autocast(True, MXFP8BlockScaling(), te.MeshResource()).enabled
    with pytest.raises(ValueError, match="row_scaled_activation=True is not supported"):
        te.autocast(True, NVFP4BlockScaling(row_scaled_activation=True))
    with pytest.raises(TypeError, match="no option 'dp_resorce'; did you mean 'dp_resource'"):
        te.MeshResource(dp_resorce="data")  # type: ignore[call-arg]


def test_collections_are_joined_and_keep_their_kind() -> None:
    new, old = {"a": jnp.ones(1)}, {"a": jnp.zeros(1), "b": jnp.zeros(2)}
    assert te.update_collections(new, old) == {"a": new["a"], "b": old["b"]}
    frozen = te.update_collections(new, freeze(old))
    assert isinstance(frozen, FrozenDict) and frozen["a"] is new["a"]
    assert te.update_fp8_metas(new) is new


@pytest.mark.parametrize(
    ("module", "name", "sentence"),
    [
        (te, "autocst", "did you mean 'autocast'"),
        (te, "dense", "`quaver.jax.linear`"),
        (te.flax, "DensGeneral", "did you mean 'DenseGeneral'"),
        (te.flax, "wrap_function_in_te_state_module", "einsum_cls"),
    ],
    ids=["near", "elsewhere", "near in flax", "elsewhere in flax"],
)
def test_a_missing_name_lists_the_present_ones(module: object, name: str, sentence: str) -> None:
    with pytest.raises(AttributeError, match=sentence):
        getattr(module, name)


def recorded(numbers: tuple[str, ...] = ("",)) -> dict[str, jnp.ndarray]:
    """What Transformer Engine keeps of a module: amaxes 1, 2 and so on, and scales their tenfold."""
    names = [f"{x}{number}" for number in numbers for x in ("x", "kernel", "grad")]
    return {f"{name}_amax_history": jnp.full(4, 1.0 + i) for i, name in enumerate(names)} | {
        f"{name}_scale": jnp.full(1, 10.0 + 10 * i) for i, name in enumerate(names)
    }


def test_recorded_state_becomes_our_state() -> None:
    theirs = {"params": {}, "fp8_metas": {"a": recorded(), "mlp": recorded(("_0", "_1"))}}
    own = te.quantize.own_collections(theirs)
    state = own[te.NVTE_FP8_COLLECTION_NAME]
    assert set(own) == {"params", te.NVTE_FP8_COLLECTION_NAME} and set(state["mlp"]) == {"wi", "wo"}
    assert state["a"]["history"].tolist() == [[1, 2, 3]] * 4 and state["a"]["factor"].tolist() == [10, 20, 30]
    # Of an MLP's gradients it quantizes the output's by the first layer's.
    assert state["mlp"]["wi"]["factor"].tolist() == [10, 20, 60]
    assert state["mlp"]["wo"]["history"][0].tolist() == [4, 5, 3]
    assert te.quantize.own_collections({"params": {}}) == {"params": {}}


def test_a_scale_that_nothing_was_recorded_for_is_unset() -> None:
    theirs = recorded() | {"grad_amax_history": jnp.zeros(4)}
    own = te.quantize.own_collections({"fp8_metas": theirs})
    assert own[te.NVTE_FP8_COLLECTION_NAME]["factor"].tolist() == [10, 20, 0]


def test_other_records_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fp8_metas\.a\.x_meta is not recorded by Transformer Engine 2\.20"):
        te.quantize.own_collections({"fp8_metas": {"a": recorded() | {"x_meta": jnp.ones(1)}}})
    short = recorded()
    del short["grad_scale"]
    with pytest.raises(ValueError, match=r"fp8_metas must have one history and one scale for each .*grad_scale"):
        te.quantize.own_collections({"fp8_metas": short})
    with pytest.raises(ValueError, match="fp8_metas must have one history"):
        te.quantize.own_collections({"fp8_metas": recorded() | {"x_amax_history": jnp.ones(3)}})
