"""Contexts by Transformer Engine's names run our recipes; everything is available."""

import pytest
import torch
from torch import Tensor

import quaver
import quaver.compat.transformer_engine.pytorch as te
import quaver.torch as qt
from quaver.compat.transformer_engine.common import recipe
from quaver.compat.transformer_engine.pytorch.quantization import check_mxfp8_support
from quaver.torch.state.context import active_context
from tests.close import assert_bitwise


def losses(layer: te.Linear, context: object, steps: int = 3) -> list[float]:
    optimizer, result = torch.optim.SGD(layer.parameters(), 0.1), []
    for i in range(steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * (1 + i)
        with context:  # type: ignore[attr-defined]
            loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


@pytest.mark.parametrize("name", recipe.RECIPES)
def test_losses_are_our_recipes(name: str) -> None:
    # Noise is each layer's own, and here are several.
    still = {"disable_stochastic_rounding": True} if name == "NVFP4BlockScaling" else {}
    given, each = recipe.RECIPES[name](**still), []
    for context in (te.autocast(recipe=given), te.fp8_autocast(fp8_recipe=given), qt.autocast(given.recipe())):
        torch.manual_seed(0)
        each.append(losses(te.Linear(32, 16), context))
    assert each[0] == each[1] == each[2] != losses(te.Linear(32, 16), te.autocast(False))


def test_without_a_recipe_the_device_decides() -> None:
    assert isinstance(te.get_default_recipe(), recipe.DelayedScaling) or torch.cuda.is_available()
    with te.autocast():
        te.Linear(16, 16)(torch.zeros(2, 16))
        assert str(active_context.now[0]).startswith("transformer_engine.")
    with te.autocast("mxfp8" == "", recipe=None):
        assert active_context.now[:2] == (None, True)


def test_contexts_nest_and_decorate() -> None:
    @te.autocast(recipe=quaver.recipes.mxfp8())
    def inside(x: Tensor) -> Tensor:
        assert active_context.now[0] is quaver.recipes.mxfp8()
        with te.autocast(enabled=False):
            assert active_context.now[0] is None
        return te.Linear(16, 16)(x)  # type: ignore[no-any-return]

    inside(torch.zeros(2, 16))
    assert active_context.now == (None, False, 0)


def test_everything_is_available() -> None:
    for name in ("is_fp8_available", "is_mxfp8_available", "is_nvfp4_available", "is_fp8_block_scaling_available"):
        assert getattr(te, name)() is True and getattr(te, name)(return_reason=True) == (True, "")
    assert check_mxfp8_support() == (True, "")


def test_checkpoints_are_ours() -> None:
    layer, x = te.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    results = []
    for again in (False, True):
        with te.autocast(recipe=recipe.MXFP8BlockScaling()):
            y = te.checkpoint(layer, x, use_reentrant=True, tp_group=None) if again else layer(x)
        results.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)
    with pytest.raises(ValueError, match="distribute_saved_activations is not supported"):
        te.checkpoint(layer, x, distribute_saved_activations=True)


def test_missing_features_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match="calibrating without quantizing is not supported"):
        te.autocast(enabled=False, calibrating=True)
    with pytest.raises(AttributeError, match=r"has no 'LayerNormLinea': did you mean 'LayerNormLinear'\?$"):
        te.LayerNormLinea  # noqa: B018
    with pytest.raises(AttributeError, match=r"'make_graphed_callables': .*CapturedStep.*captures"):
        te.make_graphed_callables  # noqa: B018
    assert not hasattr(te, "make_graphed_callables")


def test_the_global_state_reports_autocast() -> None:
    state = te.FP8GlobalStateManager
    assert not state.is_fp8_enabled() and not state.is_fp8_calibration() and not state.fp8_graph_capturing()
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert state.is_fp8_enabled() and state.get_fp8_recipe() == recipe.MXFP8BlockScaling().recipe()
        with te.autocast(enabled=False):
            assert not state.is_fp8_enabled()
    assert state.is_mxfp8_available() == (True, "")
    assert state.get_fp8_recipe() == recipe.DelayedScaling().recipe()


def test_rows_of_groups_are_padded_as_there() -> None:
    sizes = {name: te.get_align_size_for_quantization(kind()) for name, kind in recipe.RECIPES.items()}
    assert (
        sizes.pop("MXFP8BlockScaling") == 32 and sizes.pop("NVFP4BlockScaling") == 128 and set(sizes.values()) == {16}
    )


def test_a_weight_of_codes_is_a_quantized_tensor() -> None:
    with te.quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        layer = te.Linear(32, 32)
    assert isinstance(layer.weight, te.QuantizedTensor) and not isinstance(layer.bias, te.QuantizedTensor)
    assert isinstance(qt.quantize(torch.ones(2, 32), quaver.recipes.mxfp8().fprop.a), te.QuantizedTensor)
    with pytest.raises(TypeError, match=r"quaver\.torch\.quantize"):
        te.QuantizedTensor()
