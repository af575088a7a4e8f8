"""`quaver.jax.compare`: runs of a training script, and the null run that the script makes by `perturb`."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaver.jax as qj


def train(recipe: str, seed: int) -> Iterator[jax.Array]:
    weight = jax.random.normal(jax.random.key(seed), (32, 32)) / 6
    if recipe == "null":
        weight, recipe = qj.perturb(weight, seed), "bf16"

    def loss_of(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(qj.linear(x, weight, recipe=recipe) - x).mean()

    step = jax.jit(jax.value_and_grad(loss_of))
    for number in range(10):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), (16, 32))
        loss, gradient = step(weight, x)
        weight -= gradient
        yield loss


def test_a_script_is_compared_with_its_null_run(tmp_path: Path) -> None:
    comparison = qj.compare(train, ["mxfp8"], seeds=2, out=tmp_path / "out")
    assert comparison.recipes == ["bf16", "null", "mxfp8"] and comparison.emulated
    assert comparison.losses["mxfp8"][1] == [float(loss) for loss in train("mxfp8", 1)]
    difference = {row["recipe"]: row["difference"] for row in comparison.rows[1:]}
    assert 0 < abs(difference["null"]) < 1e-5 < abs(difference["mxfp8"])
    assert not any("bit for bit" in note for note in comparison.notes)
    assert (tmp_path / "out" / "mxfp8-seed1.jsonl").exists() and (tmp_path / "out" / "compare.png").exists()


def test_perturb_changes_each_weight_by_its_share() -> None:
    values = jax.random.normal(jax.random.key(0), (512, 256)) + 5
    tree = {"a": values, "b": values.astype(jnp.bfloat16), "n": jnp.arange(3), "zero": jnp.zeros(4)}
    moved = qj.perturb(tree, 3)
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), moved) == jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.shape), tree
    )
    change = np.asarray(moved["a"], np.float64) / np.asarray(values, np.float64) - 1
    assert change.std() == pytest.approx(1e-5, rel=0.02)
    assert 0.0005 < float((moved["b"] != tree["b"]).mean()) < 0.01
    assert (moved["n"] == tree["n"]).all() and not moved["zero"].any()


def test_a_script_that_does_not_know_the_null_run_is_told_what_it_is() -> None:
    with pytest.raises(ValueError, match="no recipe 'null'") as error:
        qj.compare(
            lambda recipe, seed: iter([qj.linear(jnp.ones((2, 4)), jnp.ones((4, 4)), recipe=recipe)[0, 0]]), ["mxfp8"]
        )
    assert 'the recipe "null" means "bf16"' in error.value.__notes__[0]
    notes = qj.compare(lambda recipe, seed: [1.0], ["mxfp8"]).notes
    assert "null has the losses of bf16 bit for bit: no weight was perturbed." in notes


@pytest.mark.parametrize(("recipes", "message"), [(["mxpf8"], "did you mean 'mxfp8'"), ("mxfp8", "give a list")])
def test_bad_recipes_are_refused_before_any_run(recipes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qj.compare(lambda recipe, seed: pytest.fail("began"), recipes)
