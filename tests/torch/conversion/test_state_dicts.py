"""A converted model's state dict in two parts: the unconverted model's, and what recipes add to it."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny, tokens

STATEFUL = pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])


class Tied(nn.Module):
    """Two names of one weight, one module under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.b.weight = self.a.weight
        self.again = self.a
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.again(self.a(x)))
        return y


class Attending(nn.Module):
    """torch's attention with packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))


def stream() -> Tensor:
    return torch.randn(2, 16, 32)


#: Models of every kind of layer that is converted, and their inputs.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), stream),
    "tied": (Tied, stream),
    "packed": (Attending, stream),
    "parametrized": (parametrized, stream),
    "conv1d": (lambda: tiny("gpt2"), tokens),
    "experts": (lambda: tiny("mixtral"), tokens),
    "block": (lambda: qt.TransformerLayer(32, 2, 48), stream),
    "in place": (lambda: tiny("llama"), tokens),
}


def output(net: nn.Module, x: Tensor) -> Tensor:
    y = net(x)
    return y if isinstance(y, Tensor) else y.logits  # type: ignore[no-any-return]


def converted(kind: str, recipe: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, its converted copy after two steps, and inputs."""
    make, inputs = KINDS[kind]
    torch.manual_seed(0)
    net, x = make(), inputs()
    other = copy.deepcopy(net)
    rules = {"*experts": "tensorwise", "*": recipe} if kind == "experts" else recipe
    qt.convert(other, rules, blocks=kind == "in place")
    for _ in range(2):
        output(other, x).square().mean().backward()
    return net, other, x


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        same = value.view(torch.uint8), other[name].view(torch.uint8)
        assert value.dtype is other[name].dtype, name
        assert_bitwise(*same, name)


@STATEFUL
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_part_is_the_unconverted_models_and_both_parts_are_all(kind: str, recipe: str) -> None:
    net, other, _ = converted(kind, recipe)
    plain, scaling = qt.plain_state_dict(other), qt.scaling_state_dict(other)
    assert_same(plain, net.state_dict())
    whole = other.state_dict()
    assert scaling and not set(plain) & set(scaling)
    assert_same({name: {**plain, **scaling}[name] for name in whole}, whole)
    net.load_state_dict(plain)


@STATEFUL
@pytest.mark.parametrize("kind", ["linear", "packed", "conv1d"])
def test_plain_and_scaling_states_continue_with_the_bits_of_the_model(kind: str, recipe: str) -> None:
    """Loaded strictly and without a warning, into a model that was converted and has not run."""
    _, other, x = converted(kind, recipe)
    parts = copy.deepcopy((qt.plain_state_dict(other), qt.scaling_state_dict(other)))
    fresh = KINDS[kind][0]()
    qt.convert(fresh, recipe)
    fresh.load_state_dict(parts[0])
    fresh.train(other.training)
    qt.load_scaling_state_dict(fresh, parts[1])
    results = []
    for model in (other, fresh):
        model.zero_grad()
        torch.manual_seed(1)
        y = output(model, x)
        y.square().mean().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)
    assert_same(fresh.state_dict(), other.state_dict())


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_weights_are_values_in_the_plain_part_and_codes_in_the_other(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight[0, :4] = torch.tensor([0.0, -0.0, 1e4, 1e-30])
    qt.quantize_weights(other, recipe)
    plain, scaling = qt.plain_state_dict(other), qt.scaling_state_dict(other)
    assert {name: (v.shape, v.dtype) for name, v in plain.items()} == {
        name: (v.shape, v.dtype) for name, v in net.state_dict().items()
    }
    assert {"0.weight", "0.weight_scale"} <= set(scaling)
    whole = other.state_dict()
    assert_same({name: {**plain, **scaling}[name] for name in whole}, whole)
    reverted = copy.deepcopy(other)
    qt.revert(reverted)
    assert_same(plain, reverted.state_dict())
    net.load_state_dict(plain)
    fresh = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)
    qt.quantize_weights(fresh, recipe)
    fresh.load_state_dict(plain)
    qt.load_scaling_state_dict(fresh, scaling)
    assert_same(fresh.state_dict(), whole)


def test_weights_made_in_eight_bits_and_one_layer_under_two_names() -> None:
    with qt.quantized_init("mxfp8"):
        layer = qt.Linear(32, 32)
    plain = qt.plain_state_dict(nn.ModuleDict({"a": layer, "b": layer}))
    assert list(plain) == ["a.weight", "a.bias", "b.weight", "b.bias"] and plain["a.weight"] is plain["b.weight"]
    nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}).load_state_dict(plain)


def test_names_follow_wrappers_that_change_them() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net, other, _ = converted("linear", "delayed")
    for model in (net, other):
        model[0] = checkpoint_wrapper(model[0], checkpoint_fn=checkpoint)  # type: ignore[operator, index]
    compiled = torch.compile(other)
    assert_same(qt.plain_state_dict(other), net.state_dict())
    scaling = qt.scaling_state_dict(compiled)  # type: ignore[arg-type]
    assert "_orig_mod.0.history" in scaling
    before = copy.deepcopy(scaling)
    other.load_state_dict(net.state_dict())
    qt.load_scaling_state_dict(compiled, before)  # type: ignore[arg-type]
    assert_same(qt.scaling_state_dict(compiled), before)  # type: ignore[arg-type]


def test_state_of_other_layers_is_refused_before_anything_is_loaded() -> None:
    net, other, _ = converted("linear", "delayed")
    state = qt.scaling_state_dict(other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"no layer for '7.history' and 1 more"):
        qt.load_scaling_state_dict(other, {"0.history": torch.ones(16, 3), "7.history": state["0.history"], "x.y": 0})
    assert_same(other.state_dict(), before)
    whole = {name: torch.zeros_like(value) for name, value in before.items()}
    with pytest.raises(ValueError, match=r"'0.weight' and 3 more, or it is not scaling state.*model.load_state_dict"):
        qt.load_scaling_state_dict(other, whole)
    assert_same(other.state_dict(), before)
    with pytest.raises(ValueError, match=r"call quaver\.torch\.convert"):
        qt.load_scaling_state_dict(net, state)
    stored = copy.deepcopy(net)
    qt.quantize_weights(stored, "mxfp8")
    with pytest.raises(RuntimeError, match=r"0.weight is quantized in the checkpoint"):
        qt.load_scaling_state_dict(other, qt.scaling_state_dict(stored))


@STATEFUL
def test_a_folder_of_a_converted_model_is_the_unconverted_models(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is unexpected or missing, of the model, of a copy and of a pickled one."""
    _, model, _ = converted("conv1d", recipe)
    assert qt.scaling_state_dict(model)
    for i, each in enumerate((model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        each.save_pretrained(tmp_path / str(i))  # type: ignore[operator]
        capsys.readouterr()
        kind: Any = type(model)
        loaded, report = kind.from_pretrained(tmp_path / str(i), output_loading_info=True)
        assert not any(report.values()) and "UNEXPECTED" not in "".join(capsys.readouterr())
        assert_same(loaded.state_dict(), qt.plain_state_dict(model))


def test_a_folder_of_codes_is_refused_by_the_plain_class_and_one_of_values_is_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, again = tiny("llama"), tiny("llama")
    kind: Any = type(model)
    for each in (model, again):
        qt.quantize_weights(each, "tensorwise")
        each.requires_grad_(False)
    with torch.no_grad():
        again.model.layers[0].mlp.up_proj.set_weight(torch.zeros(96, 64))
    model.save_pretrained(tmp_path / "codes")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        kind.from_pretrained(tmp_path / "codes")
    again.load_state_dict(load_file(tmp_path / "codes" / "model.safetensors"))
    assert_same(again.state_dict(), model.state_dict())
    values: Any = qt.plain_state_dict(model)
    # What transformers writes it takes out of the dictionary.
    model.save_pretrained(tmp_path / "values", state_dict=dict(values))
    loaded, report = kind.from_pretrained(tmp_path / "values", output_loading_info=True)
    assert not any(report.values())
    assert_same(loaded.state_dict(), values)
