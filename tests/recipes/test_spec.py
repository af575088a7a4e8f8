"""Test specs and recipes: errors with their messages, and value semantics (text, hash, pickle)."""

import copy
import pickle
from collections.abc import Callable

import pytest

from quaver.recipes.formats import E2M1, E4M3, E5M2, E8M0
from quaver.recipes.spec import AttentionSpec, Delayed, GemmSpec, QuantSpec, Recipe
from tests.operands import SPECS, variants

E4M3_ROW = QuantSpec(E4M3, (1, None))
E4M3_TENSOR = QuantSpec(E4M3)
HIGH = GemmSpec(None, None)
RECIPES = variants()

REFUSED: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (lambda: QuantSpec("e4m3"), ("QuantSpec.format", "'e4m3'", "quaver.E4M3")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E8M0), ("QuantSpec.format", "signed")),
    (lambda: QuantSpec(E4M3, scale="power-of-two"), ("QuantSpec.scale", "'power-of-two'", "power_of_two")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, rounding="random"), ("QuantSpec.rounding", "'random'", "stochastic")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, (0, 32)), ("QuantSpec.block", "(0, 32)", "positive")),
    (lambda: QuantSpec(E4M3, (1, -32)), ("QuantSpec.block", "(1, -32)", "None for the axis")),
    (lambda: QuantSpec(E4M3, (1, 2.5)), ("QuantSpec.block", "2.5")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, (1, 32, 1)), ("QuantSpec.block", "(rows, k)")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, [1, 32]), ("QuantSpec.block", "[1, 32]")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, 128), ("QuantSpec.block", "128")),  # type: ignore[arg-type]
    (lambda: QuantSpec(E4M3, (1, 16), "two_level"), ("two-level", "e2m1", "e4m3", "power_of_two")),
    (lambda: QuantSpec(E2M1, (1, None), "two_level"), ("two-level", "finite blocks")),
    (lambda: GemmSpec(E4M3_ROW, None), ("both operands or neither", "e4m3[1x*]:power_of_two", "None")),
    (lambda: GemmSpec("e4m3", "e4m3"), ("GemmSpec.a", "'e4m3'", "QuantSpec")),  # type: ignore[arg-type]
    (lambda: AttentionSpec(E4M3_ROW, None), ("AttentionSpec.grad_output", "None", "QuantSpec")),  # type: ignore[arg-type]
    (lambda: AttentionSpec(QuantSpec(E2M1), E4M3_ROW), ("AttentionSpec.input", "e2m1", "eight-bit")),
    (lambda: AttentionSpec(E4M3_ROW, QuantSpec(E4M3, rounding="stochastic")), ("AttentionSpec.grad", "nearest")),
    (lambda: AttentionSpec(QuantSpec(E4M3, (1, 16), hadamard=True), E4M3_ROW), ("AttentionSpec.input", "not rotated")),
    (lambda: AttentionSpec(QuantSpec(E4M3, (32, 32)), E4M3_ROW), ("AttentionSpec.input", "32x32", "(1, k)")),
    (lambda: Recipe("mine", HIGH, HIGH, HIGH, attention=E4M3_ROW), ("'mine'", "attention", "AttentionSpec")),  # type: ignore[arg-type]
    (lambda: Delayed(length=0), ("history of 0", "history=1", "tensorwise")),
    (lambda: Delayed(length=1.5), ("1.5", "history=1")),  # type: ignore[arg-type]
    (lambda: Delayed(margin=0.5), ("margin", "0.5", "whole")),  # type: ignore[arg-type]
    (lambda: Delayed(algorithm="mean"), ("algorithm", "'mean'", "max", "most_recent")),  # type: ignore[arg-type]
    (lambda: delayed_recipe(GemmSpec(E4M3_TENSOR, E4M3_ROW)), ("'mine'", "fprop.b", "e4m3[1x*]", "delayed scaling")),
    (lambda: delayed_recipe(HIGH), ("'mine'", "fprop.a", "None", "delayed scaling")),
]


def delayed_recipe(fprop: GemmSpec) -> Recipe:
    tensor = GemmSpec(E4M3_TENSOR, E4M3_TENSOR)
    return Recipe("mine", fprop, tensor, tensor, delayed=Delayed())


@pytest.mark.parametrize("build, words", REFUSED, ids=[" ".join(words) for _, words in REFUSED])
def test_invalid_specs_are_refused_with_a_suggestion(build: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        build()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{error.value!s} does not say {missing}"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_parse_inverts_str(spec: QuantSpec) -> None:
    assert QuantSpec.parse(str(spec)) == spec


def test_parse_inverts_str_for_every_combination() -> None:
    for fmt in (E4M3, E5M2, E2M1):
        for block in ((None, None), (1, None), (1, 32), (128, 128)):
            for scale in ("fp32", "power_of_two", "e8m0", "unit"):
                for rounding in ("nearest", "stochastic"):
                    for hadamard in (False, True):
                        spec = QuantSpec(fmt, block, scale, rounding, hadamard)  # type: ignore[arg-type]
                        assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_a_value(recipe: Recipe) -> None:
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert twin == recipe
        assert hash(twin) == hash(recipe)
        assert twin.operands() == recipe.operands()
        assert str(twin) == str(recipe) == recipe.name


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_partial_blocks_are_counted(spec: QuantSpec) -> None:
    for rows, k in ((1, 1), (130, 257), (0, 5), (5, 0)):
        expected = tuple(1 if b is None else (n + b - 1) // b for n, b in zip((rows, k), spec.block, strict=True))
        assert spec.blocks(rows, k) == expected
    assert [spec.padded(k) for k in (0, 1, 16, 17)] == ([0, 16, 16, 32] if spec.hadamard else [0, 1, 16, 17])
