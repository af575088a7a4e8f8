"""Test a norm fused with the following layers: the bits of separate calls, with less saved for backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.nn.norm import normalized_projections
from tests.close import assert_bitwise
from tests.pairs import pairs
from tests.torch.nn.pairs import assert_same_training, kept_bytes

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
#: Every recipe, and recipes with options.
OPTIONS = [*recipes.RECIPES, recipes.delayed(history=2, margin=1), recipes.tensorwise(power_of_two=False)]


def fused(layer: Any, x: Tensor) -> Any:
    return layer(x)


def unfused(layer: Any, x: Tensor) -> Any:
    y = layer.norm(x)
    return (layer.linear(y), y) if layer.return_normalized else layer.linear(y)


def inputs(*shape: int, dtype: torch.dtype = torch.float32, steps: int = 3) -> list[Tensor]:
    return [(torch.randn(shape) * (i + 1)).to(dtype) for i in range(steps)]


class Several(nn.Module):
    """Three projections of one normalized input, of different widths."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = qt.RMSNorm(48, dtype=dtype)
        self.a, self.b, self.c = (qt.Linear(48, n, bias=n == 16, dtype=dtype) for n in (64, 16, 16))

    @property
    def layers(self) -> list[qt.Linear]:
        return [self.a, self.b, self.c]


def several(block: Any, x: Tensor) -> Any:
    return normalized_projections(block.norm, x, block.layers)


def several_unfused(block: Any, x: Tensor) -> Any:
    y = block.norm(x)
    return tuple(layer(y) for layer in block.layers)


@pytest.mark.parametrize(
    ("recipe", "dtype", "return_normalized"),
    pairs(OPTIONS, [torch.float32, torch.bfloat16, torch.float16], [False, True]),
    ids=str,
)
def test_the_bits_match_the_parts(recipe: Any, dtype: torch.dtype, return_normalized: bool) -> None:
    layer = qt.LayerNormLinear(48, 40, return_normalized=return_normalized, dtype=dtype)
    assert_same_training(layer, [unfused, fused], recipe, inputs(2, 9, 48, dtype=dtype))


@pytest.mark.parametrize("recipe", OPTIONS, ids=str)
@DTYPES
def test_several_layers_share_one_quantized_input(recipe: Any, dtype: torch.dtype) -> None:
    assert_same_training(Several(dtype), [several_unfused, several], recipe, inputs(2, 9, 48, dtype=dtype))


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (2, 0, 48), (33, 48)])
def test_any_token_count_works(shape: tuple[int, ...]) -> None:
    assert_same_training(Several(), [several_unfused, several], "mxfp8", inputs(*shape))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_edge_case_values(recipe: str) -> None:
    x = torch.randn(9, 48)
    x[0, 0], x[1], x[2, 3], x[3] = 1e30, 0, 1e-42, 1e-20
    bad = x.clone()
    bad[4, 5], bad[5, 6] = float("nan"), float("inf")
    assert_same_training(Several(), [several_unfused, several], recipe, [x, bad, x])


@pytest.mark.parametrize("frozen", ["weights", "norm", "input"])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_frozen_parameters_get_no_gradient(frozen: str, recipe: str) -> None:
    block = Several()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(frozen == "input" or (frozen == "norm") is not name.startswith("norm"))
    assert_same_training(block, [several_unfused, several], recipe, inputs(5, 48), input_grad=frozen != "input")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "nvfp4"])
def test_under_torch_autocast(recipe: str) -> None:
    def within(run: Any) -> Any:
        def wrapped(block: Any, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return run(block, x)

        return wrapped

    assert_same_training(Several(), [within(several_unfused), within(several)], recipe, inputs(5, 48))


def test_a_layer_with_hooks_is_called() -> None:
    block, called = Several(), []
    block.b.register_forward_hook(lambda *_: called.append("b"))
    with qt.autocast("mxfp8"):
        several(block, torch.randn(4, 48))
    assert called == ["b"]


def test_a_norm_with_hooks_is_called() -> None:
    called: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: called.append(what)

    block = qt.LayerNormLinear(48, 16)
    handles = [
        block.norm.register_full_backward_hook(note("backward")),
        block.norm.register_full_backward_pre_hook(note("before backward")),
        nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__)),
    ]
    plain = block.norm.forward
    block.norm.forward = lambda x: (called.append("replaced"), plain(x))[1]  # type: ignore[method-assign]
    with qt.autocast("mxfp8"):
        block(torch.randn(4, 48, requires_grad=True)).sum().backward()
    assert set(called) == {"replaced", "LayerNorm", "Linear", "LayerNormLinear", "before backward", "backward"}
    for handle in handles:
        handle.remove()
    called.clear()
    with qt.autocast("mxfp8"):
        block(torch.randn(4, 48))
    assert called == ["replaced"]


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_a_norm_with_computed_parameters(recipe: str | None) -> None:
    block = qt.LayerNormLinear(48, 16)
    torch.nn.utils.parametrize.register_parametrization(block.norm, "weight", nn.Softplus())
    assert_same_training(block, [unfused, fused], recipe, inputs(5, 48))
    # As pruning leaves it, and FSDP with a flat parameter: an attribute.
    norm = qt.RMSNorm(48)
    del norm.weight
    norm.weight = torch.full((48,), 2.0)  # type: ignore[assignment]
    x = torch.randn(4, 48)
    assert_bitwise(norm(x), 2 * qt.RMSNorm(48)(x))


def test_layers_with_different_recipes_quantize_separately() -> None:
    block = Several()
    qt.convert(block, {"b": "nvfp4", "*": "rowwise"})
    x = torch.randn(5, 48)
    for got, want in zip(several(block, x), several_unfused(block, x), strict=True):
        assert_bitwise(got, want)


def test_a_norm_that_is_not_ours_is_called() -> None:
    block = Several()
    block.norm = nn.RMSNorm(48)
    assert_same_training(block, [several_unfused, several], "tensorwise", inputs(5, 48))


@pytest.mark.parametrize(("recipe", "share"), [("tensorwise", 1), ("rowwise", 1), ("nvfp4", 0.5625)])
def test_only_codes_of_the_normalized_input_are_saved(recipe: str, share: float) -> None:
    block = Several(torch.bfloat16)
    x = torch.randn(256, 48, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        with qt.autocast(recipe):
            return several(block, x)[0]

    run()
    numbers = 256 * 48
    scales = 48 * 4 if recipe == "rowwise" else 8
    # x itself, a float32 factor a row, gamma, and one code an element.
    assert kept_bytes(block, run) <= 2 * numbers + 4 * 256 + 4 * 48 + share * numbers + scales


def test_bad_input_gives_a_clear_error() -> None:
    layer = qt.LayerNormLinear(48, 16)
    with qt.autocast("mxfp8"):
        with pytest.raises(ValueError, match="its last axis must be 48"):
            layer(torch.randn(2, 47))
        with pytest.raises(ValueError, match=r"has torch.float32 weights and got a torch.bfloat16 input"):
            layer(torch.randn(2, 48).bfloat16())
    with qt.autocast("mxfp8"), pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(layer)(torch.randn(3, 2, 48))


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_outputs_may_be_written_to(recipe: str) -> None:
    layer = qt.LayerNormLinear(32, 48, return_normalized=True)
    x = torch.randn(2, 5, 32, requires_grad=True)
    with qt.autocast(recipe):
        outputs = layer(x)
        expected = [torch.relu(y).sum() for y in layer(x)]
    sum(y.relu_().sum() for y in outputs).backward()
    assert x.grad is not None
    assert [y.sum().item() for y in outputs] == [e.item() for e in expected]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "bf16"])
def test_weights_that_backward_does_not_read_may_be_written_before_it(recipe: str) -> None:
    """As those of nn.Linear where its input requires no gradient; where it does, autograd refuses."""
    for trains in (False, True):
        layer, x = qt.LayerNormLinear(32, 48, recipe=recipe), torch.randn(5, 32)
        layer.norm.requires_grad_(trains)
        y = layer(x)
        with torch.no_grad():
            layer.linear.weight.mul_(2)
        if trains:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert layer.linear.weight.grad is not None
