"""`qt.what_if`: predictions agree with real runs, and the rules keep both budgets and avoid planted faults."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver
import quaver.torch as qt
from tests.torch.inspection import planted
from tests.torch.inspection.planted import MODEL_KINDS, loss_of, tokens_of

TOKENS = tokens_of(0)
RECIPES = ["tensorwise", "mxfp8", "nvfp4"]
#: As if features were those of a large model, on a GPU that has all GEMMs: quantizing then pays.
LARGE: dict[str, Any] = {"gpu": "b200", "widen": 64}


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_predictions_agree_with_real_runs(kind: str) -> None:
    result = qt.what_if(MODEL_KINDS[kind](), TOKENS, loss_of, RECIPES, **LARGE)
    by_recipe = {row["recipe"]: row for row in result.summary}
    assert list(by_recipe) == [*RECIPES, "rules"]
    assert 50 * by_recipe["mxfp8"]["kl"] > by_recipe["nvfp4"]["kl"] > 3 * by_recipe["mxfp8"]["kl"] > 0
    assert by_recipe["nvfp4"]["time"] < by_recipe["mxfp8"]["time"] < 1
    for row in result.summary[:3]:
        # 25 to 30 dB are usual for 8 bits, 10 to 16 for 4.
        low, high = (8, 18) if row["recipe"] == "nvfp4" else (20, 32)
        assert low < row["grad_snr"] < high
        assert row["real_grad_snr"] < row["grad_snr"] + 6
    assert by_recipe["rules"]["kl"] <= 1e-3


def test_the_predicted_divergence_is_that_of_the_output() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(4096, 64)
    with torch.no_grad():
        # Labels that the model itself predicts make the mean of g g.T that of the KL's second derivative.
        labels = torch.distributions.Categorical(logits=model(x)).sample()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    for recipe in ("mxfp8", "nvfp4"):
        predicted = qt.what_if(model, x, loss_fn, [recipe]).summary[0]["kl"]
        quantized = copy.deepcopy(model)
        qt.convert(quantized, recipe, head=True)
        with torch.no_grad():
            p, q = (torch.log_softmax(m(x), -1) for m in (model, quantized))
        assert predicted == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.35)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_rules_leave_out_a_layer_with_a_planted_fault(kind: str) -> None:
    model = MODEL_KINDS[kind]()
    qt.convert(model, "tensorwise")
    layer, _ = planted.plant_large_channel(model, 1)
    result = qt.what_if(model, TOKENS, loss_of, ["tensorwise"], **LARGE)
    assert result.rules == {layer: None, "*": quaver.recipes.get("tensorwise")}
    worst = max((row for row in result.rows if row["kl"] is not None), key=lambda row: row["kl"])
    assert worst["layer"] == layer
    assert worst["snr"] < 3
    assert result.summary[-1]["kl"] <= 1e-3 < 0.02 < result.summary[0]["kl"]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_rules_leave_out_gradients_with_a_planted_fault(kind: str) -> None:
    model = MODEL_KINDS[kind]()
    qt.convert(model, "tensorwise")
    layer, _ = planted.plant_large_gradient(model, 1)
    recipe = "tensorwise(format='e4m3')"
    result = qt.what_if(model, TOKENS, loss_of, [recipe], max_kl=math.inf, **LARGE)
    assert result.rules[layer] == quaver.recipes.override(recipe, dgrad=None)


def test_gemms_with_bad_gradients_are_left_in_high_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        weight = torch.ones(128, 1)
        weight[7] = 1e6
        return (model(x) * weight).square().mean()

    result = qt.what_if(model, torch.randn(128, 64), loss_fn, ["nvfp4"], max_kl=math.inf, min_grad_snr=18, **LARGE)
    assert result.summary[-1]["grad_snr"] >= 18
    assert "override('nvfp4'" in result.code
    assert eval(result.code, {"recipes": quaver.recipes}) == {
        pattern: recipe if recipe is None or " with " in str(recipe) else str(recipe)
        for pattern, recipe in result.rules.items()
    }
    report = qt.convert(model, result.rules)
    assert all(recipe.gemms["wgrad"].a is None for recipe in report.converted.values() if "wgrad" in str(recipe))


def test_rules_leave_out_what_skip_left_out() -> None:
    model = MODEL_KINDS["llama"]()
    skip = ["*.o_proj", lambda name, k, n, recipe: "small" if name.endswith("layers.0.mlp.up_proj") else ""]
    result = qt.what_if(model, TOKENS, loss_of, ["mxfp8"], skip=skip, **LARGE)
    converted = qt.convert(model, result.rules).converted
    assert len(converted) == len({row["layer"] for row in result.rows}) == 21 - 3 - 1
    assert not any(name.endswith("o_proj") or name == "layers.0.mlp.up_proj" for name in converted)


def test_two_calls_of_a_layer_with_one_gradient_both_count() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(2, 32, 64)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[0]) + model(x[1])).square().sum() / 32

    def once(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[0]) + F.linear(x[1], layer.weight, layer.bias)).square().sum() / 32

    both, one, other = (
        qt.what_if(layer, batch, loss, ["mxfp8"]).summary[0]["kl"]
        for batch, loss in ((x, loss_fn), (x, once), (x.flip(0), once))
    )
    assert both == pytest.approx(one + other, rel=1e-3)


def test_only_gemms_that_ran_are_judged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[1:].requires_grad_(False)
    result = qt.what_if(model, torch.randn(32, 64), lambda model, x: model(x).square().mean() * 1e-22, ["nvfp4"])
    assert {(row["layer"], row["gemm"]) for row in result.rows} == {
        ("0", "fprop"), ("0", "wgrad"), ("2", "fprop"), ("2", "dgrad")
    }  # fmt: skip
    # Tiny gradients are not exact.
    assert 5 < result.summary[0]["real_grad_snr"] < 20


def test_a_converted_model_is_evaluated_as_if_reverted_and_does_not_change() -> None:
    model = MODEL_KINDS["llama"]()
    plain = qt.what_if(model, TOKENS, loss_of, ["mxfp8"])
    qt.convert(model, "delayed")
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    converted = qt.what_if(model, TOKENS, loss_of, ["mxfp8"])
    assert plain.rows == converted.rows
    assert qt.first_difference(model, before) is None
    assert torch.equal(random_state, torch.get_rng_state())


def test_a_small_model_stays_in_high_precision_and_the_note_says_why() -> None:
    result = qt.what_if(nn.Linear(32, 32), torch.randn(8, 32), lambda model, x: model(x).square().mean(), ["mxfp8"])
    assert result.rules == {"*": None}
    assert "widen=" in str(result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recipes": []}, "recipes is"),
        ({"recipes": "mxfp8"}, "give a list"),
        ({"recipes": ["bf16"]}, "quantizes nothing"),
        ({"recipes": ["mxfp9"]}, "mxfp9"),
        ({"gpu": "h1000"}, "h1000"),
        ({"loss_fn": lambda model, x: model(x)}, "scalar loss"),
        ({"loss_fn": lambda model, x: model(x).detach().sum()}, "without gradient"),
        ({"loss_fn": lambda model, x: (loss := model(x).sum(), loss.backward())[0]}, "called backward"),
        ({"skip": ["*"]}, "no layer"),
        ({"model": nn.Embedding(4, 4), "batch": torch.tensor([1])}, "no layer"),
        ({"batch": torch.full((4, 32), torch.nan)}, "not finite in high precision"),
        ({"max_kl": -1}, "max_kl"),
        ({"widen": 0}, "widen"),
    ],
)
@pytest.mark.filterwarnings("ignore:convert changed nothing")
def test_bad_input(arguments: dict[str, Any], words: str) -> None:
    arguments = {
        "model": nn.Linear(32, 32),
        "batch": torch.randn(8, 32),
        "loss_fn": lambda model, x: model(x).square().mean(),
        "recipes": ["mxfp8"],
        **arguments,
    }
    with pytest.raises(ValueError, match=words):
        qt.what_if(**arguments)
