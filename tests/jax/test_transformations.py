"""JAX's transformations change no gradient of a quantized layer, whichever are requested, and none becomes zero.

A transformation traces a body once and may differentiate it several times, each time for other arguments.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

from tests.close import assert_bitwise, assert_close
from tests.jax.transformed import LAYERS, NEEDS, RECIPES, TRANSFORMS, example, gradients, twice

#: These tests spend most of their time on compiling.
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
#: Properties in which two calls of one traced body differ.
FEW = ("first weights", "weights")


def gradients_of(layer: str, recipe: str, transform: str | None, how: str, needs: Sequence[str]) -> Any:
    row, table = LAYERS[layer], RECIPES[recipe]

    def f(w: Any, s: Any, x: Any) -> Any:
        return row.apply(w, s, x, table)

    run = twice if transform is None else TRANSFORMS[transform]
    got = compiled(lambda *args: gradients(run, f, *args, how=how, needs=needs))(*example(row, table))
    return jax.tree.map(np.asarray, got)


plain = cache(partial(gradients_of, transform=None, how="grad"))


def check(layer: str, recipe: str, transform: str, how: str = "grad", needs: Sequence[str] = tuple(NEEDS)) -> None:
    # A module equals its function except for the noise, which depends on its name.
    function = "" if RECIPES[recipe].stochastic else LAYERS[layer].function
    expected = plain(function or layer, recipe, needs=needs)
    got = gradients_of(layer, recipe, transform, how, needs)
    for need in needs:
        (actual, states), (wanted, next_states) = got[need], expected[need]
        for i, needed in enumerate(NEEDS[need]):
            for a, b in zip(jax.tree.leaves(actual[i]), jax.tree.leaves(wanted[i]), strict=True):
                assert bool(b.any()) is needed, f"{need}: the gradient of argument {i} is nothing to compare with"
                if LAYERS[layer].exact:
                    assert_bitwise(a, b, f"{need}, argument {i}")
                else:
                    assert_close(f"{need}, argument {i}", a, b, 1e-5)
        # A scan has one body, so that every iteration computes and records what one of them needs; a custom rule needs
        # everything.
        if not ("scan" in transform or "own" in transform) or need == "everything":
            for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(next_states), strict=True):
                assert_close(f"{need}, state", a, b, 0 if LAYERS[layer].exact else 1e-5)


@pytest.mark.parametrize(
    ("layer", "recipe", "transform"),
    [
        ("linear", "tensorwise", "checkpoint"),
        ("linear", "delayed", "two uses in scan"),
        ("linear", "mxfp8", "vmap in checkpoint"),
        ("grouped_dot", "tensorwise", "checkpoint that keeps everything"),
        ("linen in nn.remat", "tensorwise", "jit"),
        ("nnx in nnx.remat", "delayed", "jit"),
    ],
)
def test_gradients_equal_those_of_the_plain_function(layer: str, recipe: str, transform: str) -> None:
    check(layer, recipe, transform, needs=FEW)


def _cases() -> list[tuple[str, str, str]]:
    """A linear layer with every recipe, and every other layer with one recipe, another one for each transformation."""
    names = list(RECIPES)
    others = [name for name in LAYERS if name != "linear"]
    cases = list(product(["linear"], names, TRANSFORMS))
    for i, layer in enumerate(others):
        cases += [(layer, names[(i + j) % len(names)], transform) for j, transform in enumerate(TRANSFORMS)]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "recipe", "transform"), _cases())
def test_gradients_match_the_plain_function_everywhere(layer: str, recipe: str, transform: str) -> None:
    check(layer, recipe, transform)


@pytest.mark.parametrize(
    ("layer", "recipe"),
    [
        ("linear", "tensorwise"),
        *(
            pytest.param(layer, recipe, marks=pytest.mark.slow)
            for layer, recipe in product(LAYERS, RECIPES)
            if (layer, recipe) != ("linear", "tensorwise")
        ),
    ],
)
def test_a_linearized_function_transposes_to_the_gradient(layer: str, recipe: str) -> None:
    needs = FEW if (layer, recipe) == ("linear", "tensorwise") else tuple(NEEDS)
    check(layer, recipe, "checkpoint", "linearize", needs)


@pytest.mark.parametrize("transform", ["jit", "scan"])
@pytest.mark.parametrize("layer", ["linear", "grouped_dot"])
def test_a_weight_needed_unquantized_in_backward_is_not_copied(layer: str, transform: str) -> None:
    """mxfp8 quantizes a weight again for dgrad, from the parameter: backward saves the parameter itself."""
    row = LAYERS[layer]
    weight, *others = row.weights(1)

    def apply(weights: Any, x: Any) -> Any:
        f = lambda w, _, x: row.apply([w, *others], {}, x, RECIPES["mxfp8"])  # noqa: E731
        if transform == "jit":
            return jax.jit(f)(weights, {}, x)
        return jax.lax.scan(lambda h, w: (f(w, {}, h), None), x, weights)[0]

    def look(given: Any, x: Any) -> None:
        _, back = jax.vjp(apply, given, x)
        matching = [leaf for leaf in jax.tree.leaves(back) if leaf.shape == given.shape and leaf.dtype == given.dtype]
        assert len(matching) == 1 and matching[0] is given

    # Which array is saved is decided during tracing.
    given = np.stack([weight, weight]) if transform == "scan" else weight
    jax.eval_shape(look, given, example(row, RECIPES["mxfp8"])[2])
