"""`qt.bisect` and `qt.first_difference`: planted faults are named, and a model without one has no single cause."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn

import quaver.torch as qt
from tests.torch.inspection import planted
from tests.torch.inspection.planted import loss_of, model_of, tokens_of

TOKENS = tokens_of(0)
COUNTER = itertools.count(1)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", planted.MODEL_KINDS)
def test_a_model_without_a_fault_has_no_single_cause(kind: str, recipe: str) -> None:
    found = qt.bisect(model_of(kind, recipe), TOKENS, loss_of)
    assert not found.causes
    assert str(found).startswith("no single cause")
    assert max(found.contributions.values()) == next(iter(found.contributions.values())) > 0


@pytest.mark.parametrize("kind", planted.MODEL_KINDS)
def test_a_large_input_channel_is_found(kind: str) -> None:
    model = model_of(kind, "tensorwise")
    layer, _ = planted.plant_large_channel(model, 1)
    (cause,) = qt.bisect(model, TOKENS, loss_of).causes
    assert cause[:3] == (layer, "fprop", "input")


@pytest.mark.parametrize("kind", ["llama", "mixtral", "huggingface"])
def test_values_beyond_a_stale_history_are_found(kind: str) -> None:
    model = model_of(kind, "delayed(history=4)")
    planted.train(model, range(3))
    gate, down = planted.plant_large_gate(model, 1)
    causes = [cause[:3] for cause in qt.bisect(model, TOKENS, loss_of).causes]
    assert causes == [(gate, "fprop", "weight"), (down, "fprop", "input")]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_wrong_gemm_is_found_but_neither_operand(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.linear import general  # the plan is private; its fault cannot be planted from outside

    model, wgrad = small(), general.wgrad
    qt.convert(model, recipe)

    def doubled(call: Any, *arguments: Any) -> Tensor:
        y = wgrad(call, *arguments)
        return y * 2 if call.layer.qualified_name == "2" else y

    monkeypatch.setattr(general, "wgrad", doubled)
    monkeypatch.setattr(general, "_plans", {})
    (cause,) = qt.bisect(model, torch.randn(64, 32), square).causes
    assert cause[:3] == ("2", "wgrad", None)


def test_quantized_attention_is_found() -> None:
    model = model_of("llama", "mxfp8(attention=True)")
    core: Any = model.get_submodule("layers.1.attention.core")
    attend = type(core).attend

    def wrong(*qkv: Any, recipe: Any, **options: Any) -> Tensor:
        y: Tensor = attend(*qkv, recipe=recipe, **options)
        return y * 2 if recipe is not None and options["window"] == (3, 0) else y

    core.window = (3, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(core), "attend", staticmethod(wrong))
        (cause,) = qt.bisect(model, TOKENS, loss_of).causes
    assert cause[:3] == ("layers.1.attention.core", "attention", None)


def test_an_operand_can_be_another_recipes() -> None:
    found = qt.bisect(small(), torch.randn(64, 32), square, bad={"2": "nvfp4", "*": "mxfp8"}, good="mxfp8")
    assert {cause.layer for cause in found.causes} == {"2"}


def test_a_layer_is_compared_with_the_good_recipe() -> None:
    model = model_of("llama", "mxfp8")
    good = {"layers.1.mlp.up_proj": None, "*": "mxfp8"}
    causes = qt.bisect(model, TOKENS, loss_of, good=good).causes
    assert {cause.layer for cause in causes} == {"layers.1.mlp.up_proj"}


def test_a_layer_that_overflows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.linear import general  # the plan is private; its fault cannot be planted from outside

    model, fprop = small(), general.fprop
    qt.convert(model, "mxfp8")

    def overflow(call: Any, *arguments: Any) -> Tensor:
        y = fprop(call, *arguments)
        return y * torch.inf if call.layer.qualified_name == "2" else y

    monkeypatch.setattr(general, "fprop", overflow)
    monkeypatch.setattr(general, "_plans", {})
    (cause,) = qt.bisect(model, torch.randn(64, 32), square).causes
    assert cause[:3] == ("2", "fprop", None)


def test_a_wrong_implementation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from quaver.torch.operations.ops import MATMUL  # an implementation's fault cannot be planted from outside

    model = small()
    qt.convert(model, "mxfp8")
    cpu = next(each for each in MATMUL.implementations if each.name == "cpu")
    run = cpu.run

    def wrong(a: Any, b: Any, *arguments: Any) -> Tensor:
        y = run(a, b, *arguments)
        return y * 1.5 if (a.shape[0], b.shape) == (64, (64, 32)) else y

    monkeypatch.setitem(cpu.__dict__, "run", wrong)
    found = qt.bisect(model, torch.randn(64, 32), square, good="reference", bad="cpu")
    assert found.causes[0][:3] == ("0", "fprop", None)


def with_large_channel(model: nn.Module) -> nn.Module:
    """Add a huge channel to the input of layer 2, which does not read it in high precision."""
    layer: Any = model[2]  # type: ignore[index]
    with torch.no_grad():
        layer.weight[:, 3] = 0
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1e6 * (torch.arange(64) == 3),))
    return model


def test_rounding_is_no_cause() -> None:
    model = model_of("llama", "tensorwise").bfloat16()
    with pytest.raises(ValueError, match="but for rounding"):
        qt.bisect(model, TOKENS, loss_of, good="tensorwise")


def test_is_bad_replaces_the_comparison_of_errors() -> None:
    model, x = with_large_channel(small()), torch.randn(64, 32)
    exact = square(model, x).item()
    found = qt.bisect(model, x, square, bad="tensorwise", is_bad=lambda loss, gradients: abs(loss / exact - 1) > 0.1)
    assert [cause[:3] for cause in found.causes] == [("2", "fprop", "input")]


def test_nothing_changes_and_recomputation_is_substituted_too() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.dropout = with_large_channel(small()), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(lambda y: self.dropout(self.body(y)), x, use_reentrant=False)

    model, x = Recomputed(), torch.randn(64, 32)
    qt.convert(model, "delayed")
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    (cause,) = qt.bisect(model, x, square).causes
    assert cause[:3] == ("body.2", "fprop", "input")
    assert qt.first_difference(model, before) is None
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no quantized layer ran"),
        ({"good": "mxfp8", "bad": "mxfp8"}, "the same under good and bad"),
        ({"good": "reference", "bad": "mxfp8"}, "must be one too"),
        ({"bad": "mxfp9"}, "mxfp9"),
        ({"bad": "mxfp8", "loss_fn": lambda model, x: square(model, x) * next(COUNTER)}, "make it deterministic"),
        ({"bad": "mxfp8", "is_bad": lambda loss, gradients: False}, "must return True and False"),
        ({"bad": "mxfp8", "loss_fn": lambda model, x: model(x)}, "scalar loss"),
        ({"bad": "mxfp8", "batch": torch.full((4, 32), torch.nan)}, "quantization is not the cause"),
    ],
)
def test_bad_input_to_bisect(arguments: dict[str, Any], words: str) -> None:
    arguments = {"batch": torch.ones(4, 32), "loss_fn": square} | arguments
    with pytest.raises(ValueError, match=words):
        qt.bisect(small(), **arguments)


# ---- first_difference ----


def test_the_first_tensor_that_differs_in_module_order(tmp_path: Path) -> None:
    a = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    b = copy.deepcopy(a)
    assert qt.first_difference(a, b) is None
    with torch.no_grad():
        b[10].weight[1, 2] += 0.5
        b[2].bias[1] = torch.nan
    for step, (one, other) in enumerate([(a, b), (a.state_dict(), b)]):
        found = qt.first_difference(one, other)
        assert found is not None, step
        assert (found.name, found.count, found.largest) == ("2.bias", 1, math.inf)
    save_file(a.state_dict(), tmp_path / "a.safetensors")
    torch.save({"model": b.state_dict()}, tmp_path / "b.pt")
    found = qt.first_difference(tmp_path / "a.safetensors", b)
    assert found is not None
    assert found.name == "2.bias"
    found = qt.first_difference(tmp_path / "b.pt", {"model": a.state_dict()})
    assert found is not None
    assert found.name == "model.2.bias"


def test_differences_of_every_kind() -> None:
    x = torch.arange(6.0).view(2, 3)
    cases: list[tuple[Any, Any, str]] = [
        ({"x": x}, {"x": x + torch.tensor([0, 0, 0.5])}, "x: 2 of 6 elements differ, by at most 0.5 (0.1 of"),
        ({"x": x}, {"x": x.t()}, "x: shape (2, 3) in a, (3, 2) in b"),
        ({"x": x}, {"x": x.bfloat16()}, "x: dtype"),
        ({"x": x}, {}, "x: missing in b"),
        ({}, {"x": x}, "x: missing in a"),
        ({"step": 3}, {"step": 4}, "step: 3 in a, 4 in b"),
        ({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)}, "x: 1 of 1 elements differ, by at most 0 "),
    ]
    for a, b, words in cases:
        assert str(qt.first_difference(a, b)).startswith(words)
    assert qt.first_difference({"x": torch.tensor(torch.nan)}, {"x": torch.tensor(torch.nan)}) is None


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint"):
        qt.first_difference(tmp_path, tmp_path)
