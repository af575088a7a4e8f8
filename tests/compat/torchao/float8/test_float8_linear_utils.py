"""A model converted by torchao's name trains as the one that torchao converts."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchao import float8 as theirs
from torchao.float8.float8_utils import compute_error as their_error

import quaver.torch as qt
from quaver.compat.torchao import float8 as ours
from quaver.compat.torchao.float8.float8_linear import Float8Linear
from quaver.compat.torchao.float8.float8_linear_utils import swap_linear_layers
from quaver.compat.torchao.float8.float8_utils import compute_error, fp8_tensor_statistics

RECIPES = [name.value for name in ours.Float8LinearRecipeName]


def net(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96, bias), nn.GELU(), nn.Linear(96, 48, bias)).to(dtype)


def emulated(name):
    fields = vars(theirs.Float8LinearConfig.from_recipe_name(name)) | {"emulate": True}
    return theirs.Float8LinearConfig(**fields)


def trained(model, x, steps=3):
    """Losses, and all gradients of the first step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, first = [], None
    for _ in range(steps):
        loss = model(x).float().square().mean()
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_torchaos(name):
    """In float32, where torchao adds a bias to the sum itself: codes are equal, sums differ by their order."""
    x = torch.randn(40, 64)
    a = theirs.convert_to_float8_training(net(), config=emulated(name))
    b = ours.convert_to_float8_training(net(), config=ours.Float8LinearConfig.from_recipe_name(name))
    (expected, their_gradients), (losses, gradients) = trained(a, x), trained(b, x)
    assert losses == pytest.approx(expected, rel=1e-4)
    for gradient, their in zip(gradients, their_gradients, strict=True):
        assert (gradient - their).norm() <= 1e-5 * their.norm()


def test_the_same_layers_are_converted_as_by_torchao():
    model = nn.ModuleDict({"a": net(), "head": nn.Linear(48, 32), "norm": nn.LayerNorm(32)})

    def keeps(module, name):
        return name != "a.2"

    expected = theirs.convert_to_float8_training(copy.deepcopy(model), module_filter_fn=keeps)
    converted = ours.convert_to_float8_training(model, module_filter_fn=keeps)
    assert converted is model
    names = [n for n, m in expected.named_modules() if type(m).__name__ == "Float8Linear"]
    assert [n for n, m in converted.named_modules() if isinstance(m, Float8Linear)] == names == ["a.0", "head"]
    assert list(converted.state_dict()) == list(expected.state_dict())


def test_a_root_that_is_a_layer_is_converted_in_place():
    layer = nn.Linear(32, 32)
    assert ours.convert_to_float8_training(layer) is layer
    assert isinstance(layer, Float8Linear)
    assert not isinstance(nn.Linear(4, 4), Float8Linear)


def test_a_layer_is_made_from_another():
    layer = nn.Linear(32, 48).eval()
    made_of = Float8Linear.from_float(layer, ours.Float8LinearConfig.from_recipe_name("rowwise"))
    assert made_of.weight is layer.weight and made_of.bias is layer.bias and not made_of.training
    x = torch.randn(8, 32)
    expected = theirs.float8_linear.Float8Linear.from_float(layer, emulated("rowwise"))(x)
    assert compute_error(expected, made_of(x)) > 100
    swapped = swap_linear_layers(net(), Float8Linear.from_float, module_filter_fn=lambda m, name: name == "2")
    assert [isinstance(m, Float8Linear) for m in swapped] == [False, False, True]


def test_layers_have_the_settings_of_gemms_that_torchaos_have():
    """By its classes' fields, of a converted layer, one that is made of another, and after revert no longer."""
    options = {"emulate": True, "pad_inner_dim": True}
    made = []
    for module in (ours, theirs):
        gemms = {
            "gemm_config_output": module.Float8GemmConfig(),
            "gemm_config_grad_weight": module.Float8GemmConfig(True),
        }
        config = module.Float8LinearConfig(**gemms, **options)
        kind = Float8Linear if module is ours else theirs.float8_linear.Float8Linear
        converted = module.convert_to_float8_training(net(), config=config)
        made += [
            (converted[0].linear_mm_config, kind.from_float(nn.Linear(16, 16), config).linear_mm_config, converted)
        ]
    assert made[0][:2] == made[1][:2]
    assert isinstance(made[0][0], ours.LinearMMConfig) and made[0][0]._fields == made[1][0]._fields
    assert ours.LinearMMConfig() == theirs.LinearMMConfig() and ours.ScaledMMConfig() == theirs.ScaledMMConfig()
    copied = copy.deepcopy(made[0][2])
    assert copied[2].linear_mm_config == made[0][0]
    qt.revert(copied)
    assert not hasattr(copied[2], "linear_mm_config")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("by_name", [False, True])
def test_the_filter_by_size_is_torchaos(name, by_name):
    given, expected = (
        partial(getattr(module.float8_linear_utils, f"_auto_filter_for_{name}"), filter_fqns=["output"])
        if by_name
        else module._auto_filter_for_recipe(name, filter_fqns=["output"])
        for module in (ours, theirs)
    )
    sizes = (512, 1024, 1040, 2048, 2056, 4096, 4112, 8192)
    with torch.device("meta"):
        for k, n in itertools.product(sizes, sizes):
            for fqn in ("w1", "layers.0.output"):
                layer = nn.Linear(k, n, bias=False)
                assert given(layer, fqn) is expected(layer, fqn), (k, n, fqn)
    assert not given(nn.GELU(), "act")
    with pytest.raises(ValueError, match="no thresholds"):
        ours._auto_filter_for_recipe("rowwise_with_gw_hp", [])


def test_errors_and_statistics_are_torchaos():
    x = torch.randn(100)
    y = x.to(torch.float8_e4m3fn).float()
    assert torch.equal(compute_error(x, y), their_error(x, y))
    codes = torch.tensor([0.0, -0.0, 448.0, -448.0, 1.0]).to(torch.float8_e4m3fn)
    assert fp8_tensor_statistics(codes) == (2, 2)
    assert fp8_tensor_statistics(torch.tensor([57344.0, 0.0, 3.0]), torch.float8_e5m2) == (1, 1)


def test_scales_are_not_precomputed_where_nothing_is_sharded():
    with pytest.raises(ValueError, match="call fully_shard"):
        ours.precompute_float8_dynamic_scale_for_fsdp(net())


def test_it_is_reverted_as_any_other():
    model = net()
    ours.convert_to_float8_training(model)
    assert qt.revert(model) == ["0", "2"]
    assert type(model[0]) is nn.Linear


def test_weights_travel_as_codes_where_there_are_processes():
    config = ours.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    x = torch.randn(4, 16)
    alone = ours.convert_to_float8_training(nn.Linear(16, 16), config=config)
    assert type(alone.weight) is nn.Parameter and alone(x).isfinite().all()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = ours.convert_to_float8_training(nn.Linear(16, 16), config=config)
        with pytest.raises(ValueError, match="prepared by gather_quantized but is not managed by fully_shard"):
            layer(x)
    finally:
        dist.destroy_process_group()
