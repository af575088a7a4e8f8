"""Test the MLP: the bits of its parts, no saved activation result, options that save less."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe
from quaver.torch.nn.activation import ACTIVATIONS
from tests.close import assert_bitwise, assert_close
from tests.pairs import pairs
from tests.torch.nn.pairs import assert_same_training, kept_bytes

OPTIONS = [*recipes.RECIPES, recipes.delayed(history=2, margin=1), recipes.mxfp8(weight_2d=True)]
QUANTIZED = [name for name, build in recipes.RECIPES.items() if build().fprop.a is not None]


def whole_module(mlp: Any, x: Tensor) -> Tensor:
    return mlp(x)


def layer_by_layer(mlp: Any, x: Tensor) -> Tensor:
    y = x if mlp.norm is None else mlp.norm(x)
    between = [getattr(mlp, name)(y) for name in ("gate_up_proj", "gate_proj", "up_proj") if hasattr(mlp, name)]
    return mlp.down_proj(qt.activate(mlp.activation, *between))


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [(torch.randn(shape) * (i + 1)).to(dtype) for i in range(3)]


@pytest.mark.parametrize(
    ("recipe", "dtype", "shape"),
    pairs(
        OPTIONS,
        [torch.float32, torch.bfloat16, torch.float16],
        [("swiglu", True), ("swiglu", False), ("gelu", True)],
    ),
    ids=str,
)
def test_the_bits_match_the_parts(recipe: Any, dtype: torch.dtype, shape: tuple[str, bool]) -> None:
    activation, fused = shape
    mlp = qt.LayerNormMLP(48, 64, activation, normalization="RMSNorm", fused=fused, dtype=dtype)
    assert_same_training(mlp, [layer_by_layer, whole_module], recipe, inputs(2, 9, 48, dtype=dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    assert_same_training(qt.MLP(32, 48, activation), [layer_by_layer, whole_module], "mxfp8", inputs(5, 32))


@pytest.mark.parametrize("recipe", recipes.RECIPES)
@pytest.mark.parametrize("activation", ["swiglu", "gelu_exact"])
def test_recomputing_changes_no_bit(recipe: str, activation: str) -> None:
    plain = qt.LayerNormMLP(48, 64, activation)
    again = qt.LayerNormMLP(48, 64, activation, recompute=True)
    again.load_state_dict(plain.state_dict())

    def recomputing(mlp: Any, x: Tensor) -> Tensor:
        mlp.recompute = True
        return mlp(x)

    assert_same_training(plain, [whole_module, recomputing], recipe, inputs(2, 9, 48))
    assert again.recompute and "recompute=True" in repr(again)


@pytest.mark.parametrize("frozen", ["", "up_proj", "down_proj", "both"])
@pytest.mark.parametrize(
    ("recipe", "dtype", "activation"),
    [
        ("tensorwise", torch.bfloat16, "swiglu"),
        ("delayed", torch.float32, "geglu"),
        ("mxfp8", torch.bfloat16, "reglu"),
        ("nvfp4", torch.float16, "swiglu"),
        ("tensorwise", torch.bfloat16, "clamped_swiglu"),
    ],
)
def test_recomputation_beside_the_gradients_changes_no_bit(
    recipe: str, dtype: torch.dtype, activation: str, frozen: str
) -> None:
    """The activation has more elements than the limit for saving its codes."""
    mlp = qt.LayerNormMLP(32, 192, activation, fused=False, dtype=dtype)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).weight.requires_grad_(name != frozen and frozen != "both")
    assert_same_training(mlp, [whole_module, layer_by_layer], recipe, inputs(96, 32, dtype=dtype))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_eight_bit_activations_change_only_gradients_before_the_activation(recipe: str) -> None:
    # Once in bfloat16, and more values than are decoded at once.
    tokens, dtype = (6144, torch.bfloat16) if recipe == "mxfp8" else (128, torch.float32)
    exact = qt.LayerNormMLP(64, 96, "swiglu", normalization="RMSNorm", dtype=dtype)
    narrow = qt.LayerNormMLP(64, 96, "swiglu", normalization="RMSNorm", dtype=dtype, eight_bit_activations=True)
    narrow.load_state_dict(exact.state_dict())
    x = torch.randn(tokens, 64).to(dtype)
    for mlp in (exact, narrow):
        with qt.autocast(recipe):
            mlp(x).square().sum().backward()
    with qt.autocast(recipe), torch.no_grad():
        assert_bitwise(narrow(x), exact(x))
    assert_bitwise(narrow.down_proj.weight.grad, exact.down_proj.weight.grad)
    # With four bits, a changed scale changes the codes of its block by whole steps.
    far = 0.15 if recipe == "mxfp4" else 0.1
    assert_close("gradient of gate and up", narrow.gate_up_proj.weight.grad, exact.gate_up_proj.weight.grad, far)
    assert not torch.equal(narrow.gate_up_proj.weight.grad, exact.gate_up_proj.weight.grad)


def test_saved_tensors_are_the_expected_ones() -> None:
    tokens, dim, hidden = 256, 64, 192
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    saved_bytes = {}
    for option in ({}, {"eight_bit_activations": True}, {"recompute": True}):
        mlp = qt.LayerNormMLP(
            dim, hidden, "swiglu", normalization="RMSNorm", bias=False, dtype=torch.bfloat16, **option
        )

        def run(mlp: Any = mlp) -> Tensor:
            with qt.autocast("tensorwise"):
                return mlp(x)

        run()
        saved_bytes[str(option)] = kept_bytes(mlp, run)
    alone = 2 * tokens * dim
    # Codes of the input and a number a token, the gain as it is; the scale of one tensor's codes takes eight bytes.
    normed = tokens * dim + 4 * tokens + 8
    default = alone + normed + 2 * tokens * 2 * hidden
    narrow = alone + normed + (1 + 1 / 32) * tokens * 2 * hidden + tokens * hidden + 8
    assert list(saved_bytes.values()) == [default, narrow, alone]


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_tensors_needed_only_for_a_frozen_input_are_not_saved(recipe: str) -> None:
    mlp, x = qt.MLP(64, 64, "swiglu"), torch.randn(128, 64)
    mlp.gate_up_proj.requires_grad_(False)

    def run(way: Any) -> int:
        with qt.autocast(recipe):
            return kept_bytes(mlp, lambda: way(mlp, x))

    assert run(whole_module) <= run(layer_by_layer) <= 128 * 64 + 512
    assert_same_training(mlp, [layer_by_layer, whole_module], recipe, inputs(5, 64), input_grad=False)


@pytest.mark.parametrize("reused", [True, False])
def test_noise_on_the_input_is_the_forwards(reused: bool) -> None:
    quiet = QuantSpec(E4M3, (1, 1) if reused else (1, None))
    noisy = replace(quiet, rounding="stochastic")
    recipe = Recipe("noisy", GemmSpec(noisy, quiet), GemmSpec(quiet, quiet), GemmSpec(quiet, noisy))
    assert recipe.reuse.input is reused
    assert_same_training(qt.MLP(48, 64), [layer_by_layer, whole_module], recipe, inputs(9, 48))


def test_without_a_recipe_it_equals_torch() -> None:
    mlp, x = qt.LayerNormMLP(32, 48, "gelu_exact"), torch.randn(7, 32)
    y = F.gelu(F.linear(F.layer_norm(x, (32,)), mlp.up_proj.weight, mlp.up_proj.bias))
    assert_close("output", mlp(x), F.linear(y, mlp.down_proj.weight, mlp.down_proj.bias), 1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_norm_output_is_returned_too(recipe: str, activation: str) -> None:
    mlp = qt.LayerNormMLP(64, 96, activation, return_normalized=True)
    plain = copy.deepcopy(mlp)
    plain.return_normalized = False
    runs = []
    for layer in (mlp, plain):
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with qt.autocast(recipe):
            y = layer(x)
            y = y if layer is mlp else (y, layer.norm(x))
        (y[0] * 2 + y[1]).sum().backward()
        runs.append([*y, x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*runs, strict=True):
        assert_close("both ways", one, other, 1e-6)


def test_bad_input_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="did you mean 'swiglu'"):
        qt.MLP(8, 16, "swigl")
    with pytest.raises(ValueError, match="its last axis must be 8"):
        qt.MLP(8, 16)(torch.randn(2, 7))
    with pytest.raises(ValueError, match="no normalization"):
        qt.MLP(8, 16, normalization="BatchNorm")
    with pytest.raises(ValueError, match="has no option 'limt'"):
        qt.MLP(8, 16, "clamped_swiglu", activation_options={"limt": 3.0})
