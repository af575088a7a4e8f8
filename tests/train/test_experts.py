"""Test runs of models with experts, latent attention and state spaces: records, resuming, errors."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quaver.train import TrainResult, checkpoint, frameworks, mesh, run_training
from quaver.train import config as recipe_name
from quaver.train.learner import NonFiniteError
from quaver.train.loop import Interrupted
from quaver.train.metrics import losses, read
from quaver.train.model_config import MODELS
from quaver.train.torch import learner
from quaver.train.torch.decoder import build_decoder, loss_of
from quaver.train.torch.learner import first_module
from tests.pairs import alternating
from tests.train.conftest import MakeConfig
from tests.train.test_ranks import plain, start

PRESETS = [name for name in MODELS if name.endswith("-tiny") and MODELS[name].unusual]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRESETS:
        monkeypatch.setitem(MODELS, name, replace(MODELS[name], layers=2))


def records(result: TrainResult) -> list[dict[str, Any]]:
    return read(result.folder / "metrics.jsonl")


@pytest.mark.parametrize(("name", "recipe"), alternating(PRESETS, ["bf16", "delayed(history=4)", "nvfp4"], []))
def test_a_resumed_run_equals_an_uninterrupted_one(make_config: MakeConfig, name: str, recipe: str) -> None:
    options: dict[str, Any] = {"model": name, "recipe": recipe, "steps": 4, "checkpoint_every": 2, "validate_every": 0}
    whole = run_training(make_config("whole", **options))

    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            raise KeyboardInterrupt

    config = make_config("parts", **options)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run_training(config, watch=stop)
    resumed = run_training(config, resume=True)
    timed = ("seconds", "tokens_per_second")
    stored = [[{k: v for k, v in each.items() if k not in timed} for each in records(run)] for run in (whole, resumed)]
    assert stored[0] == stored[1] and len(stored[0]) == 5
    ours, theirs = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_experts_are_counted_in_the_metrics(make_config: MakeConfig) -> None:
    options = {"model": "mixtral-tiny", "steps": 2, "batch": 2, "sequence": 32, "accumulate": 2, "validate_every": 1}
    first, validated, *_ = records(run_training(make_config(recipe="mxfp8", capacity=1.0, **options)))
    choices = 2 * 2 * 32 * 2
    for layer in range(2):
        assert sum(first[f"load_{layer}_{expert}"] for expert in range(8)) == choices
    assert first["busiest"] >= 1 and 0 < first["dropped"] < 1 and first["z_loss"] > 0
    assert first["balance_loss"] == pytest.approx(1, rel=0.5)
    assert 0 < validated["choices_differ"] < 0.2
    plain = records(run_training(make_config("plain", recipe="bf16", **options)))
    assert plain[0]["dropped"] == 0 and "choices_differ" not in plain[1]


def test_codes_alone_train_and_their_choices_are_not_compared(make_config: MakeConfig) -> None:
    result = run_training(make_config(model="mixtral-tiny", recipe="tensorwise", optimizer="lean", steps=3))
    assert result.losses[3] < result.losses[1] and "choices_differ" not in records(result)[-1]


def test_muon_refuses_weights_of_three_axes(make_config: MakeConfig) -> None:
    for name, kind in (("mixtral-tiny", "experts"), ("mamba2-tiny", "state-space layers")):
        with pytest.raises(
            ValueError, match=f"{name} has {kind}, whose weights have three axes; take --optimizer adamw"
        ):
            run_training(make_config(model=name, optimizer="muon-lean"))


def test_balancing_reaches_the_weights(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported loss is the cross-entropy; the added terms change the loss of the next step."""
    seen = []
    for number, z in enumerate((0.0, 10.0)):
        own = MODELS["mixtral-tiny"].experts
        assert own is not None
        changed = replace(MODELS["mixtral-tiny"], experts=replace(own, z=z))
        monkeypatch.setitem(MODELS, "mixtral-tiny", changed)
        seen.append(losses(records(run_training(make_config(str(number), model="mixtral-tiny", steps=3)))))
    assert seen[0][1] == seen[1][1] and seen[0][3] != seen[1][3]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("option", ["pp", "cp", "tp"])
def test_ranks_that_would_divide_such_layers_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = make_config(model=name, **{option: 2})
    with pytest.raises(ValueError, match=f"{option} is 2, and {name} has .*; leave out --{option}"):
        mesh.sizes_of(config, recipe_name.find_recipe("bf16"))


def test_a_router_with_nonfinite_logits_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_decoder(MODELS["mixtral-tiny"], 256, 0, torch.device("cpu"))
    router = model.layers[1].mlp.router
    router.register_forward_hook(lambda module, inputs, routing: routing._replace(logits=routing.logits * torch.nan))
    batch = torch.zeros((1, 2, 17), dtype=torch.int64)
    place = first_module(model, batch, partial(loss_of, model, dtype="float32"))
    assert place.message == "the first output that is not finite is that of layers.1.mlp.router"

    def poisoned(*arguments: Any) -> Any:
        model = build_decoder(*arguments)
        with torch.no_grad():
            model.layers[0].mlp.router.weight[3, 5] = torch.nan
        return model

    monkeypatch.setattr(learner, "build_decoder", poisoned)
    with pytest.raises(NonFiniteError, match=r"is nan; the parameter layers\.0\.mlp\.router\.weight is"):
        run_training(make_config(model="mixtral-tiny"))


@pytest.mark.ranks
def test_ranks_that_share_a_batch_train_as_one_process(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts' counts are those of both ranks, and so are the balance loss of a whole batch and the moved biases."""
    common: dict[str, Any] = {"dtype": "float32", "steps": 3, "batch": 4, "validate_every": 0, "fsdp": 2}
    recipes = {"mixtral-tiny": "bf16", "deepseek-tiny": "mxfp8"}
    configs = {name: make_config(name, model=name, recipe=recipe, **common) for name, recipe in recipes.items()}
    start([*configs.values()], tmp_path / "ranks", 2)
    monkeypatch.undo()
    for name, config in configs.items():
        whole = plain(config, f"{name}-whole")
        result = run_training(whole)
        ours, theirs = ([r for r in read(Path(c.out) / "metrics.jsonl") if "loss" in r] for c in (config, whole))
        for one, other in zip(ours, theirs, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=2e-3 if recipes[name] != "bf16" else 1e-6)
            if "balance_loss" in other:
                assert one["balance_loss"] == pytest.approx(other["balance_loss"], rel=1e-2)
        loads = [{key: value for key, value in r[0].items() if key.startswith("load_")} for r in (ours, theirs)]
        # Of the first step: later ones may differ where scores are nearly equal.
        assert loads[0].keys() == loads[1].keys()
        difference = sum(abs(loads[0][key] - loads[1][key]) for key in loads[0])
        assert difference <= 0.01 * sum(loads[1].values()), name
        saved = checkpoint.load(Path(config.out) / "step-000003", {})
        model = result.model.state_dict()
        assert saved.model.keys() == model.keys(), name
        for key in model:
            if key.endswith("router.balance"):
                assert np.abs(saved.model[key] - model[key].numpy()).mean() <= 2e-4, key


@pytest.mark.parametrize("name", PRESETS)
def test_jax_refuses_before_the_text_is_read(make_config: MakeConfig, name: str) -> None:
    pytest.importorskip("jax")
    with pytest.raises(ValueError, match=f"JAX cannot train .* yet, as {name} has; take --framework torch"):
        frameworks.check_options(make_config(model=name, framework="jax"), recipe_name.find_recipe("bf16"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"capacity": 1.25}, "capacity is 1.25, and nano has no experts; leave out --capacity"),
        ({"capacity": -1.0, "model": "mixtral-tiny"}, "capacity is -1.0; it must be at least 0"),
        ({"capacity": float("inf"), "model": "mixtral-tiny"}, "capacity is infinite; leave it out"),
    ],
)
def test_a_capacity_that_does_nothing_is_refused(
    make_config: MakeConfig, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**options)
