"""What backward may reuse, and that reuse changes no bit."""

import numpy as np
import pytest

from quaver.costs.ledger import saved_bytes
from quaver.recipes import get
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import GemmSpec, OperandReuse, QuantSpec, Recipe, reusable
from quaver.reference import quantize
from tests.close import assert_bitwise
from tests.operands import SPECS, nasty, variants

#: What forward or dgrad quantizes that another GEMM can use: input, weight, grad_output.
REUSED = {
    "delayed": OperandReuse(True, True, True),
    "tensorwise": OperandReuse(True, True, True),
    "rowwise": OperandReuse(False, False, False),
    "rowwise_bf16_wgrad": OperandReuse(False, False, False),
    "blockwise": OperandReuse(False, True, False),
    "mxfp8": OperandReuse(False, False, False),
    "mxfp6": OperandReuse(False, False, False),
    "mxfp4": OperandReuse(False, False, False),
    "nvfp4": OperandReuse(False, True, False),
    "bf16": OperandReuse(False, False, False),
}


@pytest.mark.parametrize("name", REUSED)
def test_each_recipe_reuses_the_expected_operands(name: str) -> None:
    assert get(name).reuse == REUSED[name]


def test_square_blocks_use_one_weight_copy_for_both_gemms() -> None:
    assert get("mxfp8", weight_2d=True).reuse.weight
    assert not get("nvfp4", weight_2d=False).reuse.weight


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_reused_operand_has_the_bits_of_one_quantized_again(spec: QuantSpec) -> None:
    if not reusable(spec, spec):
        return
    for name, x in nasty((37, 70)).items():
        q, again = quantize(x, spec), quantize(np.ascontiguousarray(x.T), spec)
        assert_bitwise(q.codes().T, again.codes(), f"{name}, codes")
        assert_bitwise(q.scales().T, again.scales(), f"{name}, scales")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_is_reused_under_another_spec_or_none(spec: QuantSpec) -> None:
    assert not reusable(spec, None) and not reusable(None, spec) and not reusable(None, None)
    assert not any(reusable(spec, other) for other in SPECS.values() if other != spec)


def test_stochastic_operands_are_not_transposed_into_each_other() -> None:
    stochastic = [s for s in SPECS.values() if s.rounding == "stochastic"]
    assert stochastic and not any(reusable(s, s) for s in stochastic)


@pytest.mark.parametrize("recipe", variants().values(), ids=variants())
def test_backward_keeps_half_the_bytes_of_bf16_and_four_bits_keep_a_third(recipe: Recipe) -> None:
    tokens, features = 4096, 1024
    spec = recipe.wgrad.b
    share = saved_bytes(recipe, tokens, features) / (2 * tokens * features)
    if spec is None:
        assert share == 1
    else:
        assert spec.format.bits / 16 < share <= (0.3 if spec.format.bits == 4 else 0.52)


def test_saved_bytes_count_padding_and_partial_blocks() -> None:
    assert saved_bytes(get("tensorwise"), 3, 5) == 15 + 4
    assert saved_bytes(get("rowwise"), 3, 5) == 15 + 5 * 4
    assert saved_bytes(get("mxfp8"), 33, 5) == 165 + 5 * 2
    assert saved_bytes(get("nvfp4"), 17, 5) == 5 * 32 // 2 + 5 * 2
    assert saved_bytes(get("bf16"), 3, 5, itemsize=4) == 60


def test_a_tensor_scale_counts_four_bytes() -> None:
    spec = QuantSpec(E4M3, (1, 32), "unit")
    gemm = GemmSpec(spec, spec)
    recipe = Recipe(name="units", fprop=gemm, dgrad=gemm, wgrad=gemm)
    stored = quantize(np.ones((5, 33), np.float32), spec)
    assert saved_bytes(recipe, 33, 5) == stored.codes().nbytes + stored.scale.nbytes
