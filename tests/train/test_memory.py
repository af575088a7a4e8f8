"""The bytes that `training_footprint` predicts are those of the live tensors."""

import math
from dataclasses import replace

import pytest
import torch

from quaver.reference.optimizer_state import PRESETS
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train import memory
from quaver.train.model_config import MODELS
from quaver.train.torch.learner import TorchLearner
from tests.pairs import alternating, pairs
from tests.train.conftest import MakeConfig


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


OPTIMIZERS = ("adamw", *PRESETS, "lion-lean", "sgd-balanced", "muon-lean", "schedulefree-lean")
#: States of one number per parameter, or of amaxes, which are not counted.
NUMBERS = ("step", "amax", "lr_max", "weight_sum")
RECIPES = ("bf16", "tensorwise", "mxfp8(weight_2d=True)", "blockwise", "mxfp8 until 50%, bf16")


@pytest.mark.parametrize(("optimizer", "recipe"), alternating(OPTIMIZERS, RECIPES, ["lean"]))
def test_bytes_match_live_tensors(make_config: MakeConfig, optimizer: str, recipe: str) -> None:
    check("nano", make_config, optimizer, recipe)


@pytest.mark.parametrize(
    ("model", "optimizer", "recipe"), pairs(["mixtral-tiny", "mamba2-tiny"], ["lean", "exact"], ["bf16", "tensorwise"])
)
def test_bytes_of_stacks_and_of_mixers_are_too(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, model: str, optimizer: str, recipe: str
) -> None:
    monkeypatch.setitem(MODELS, model, replace(MODELS[model], layers=1))
    check(model, make_config, optimizer, recipe)


def check(model: str, make_config: MakeConfig, optimizer: str, recipe: str) -> None:
    config = make_config(model=model, optimizer=optimizer, recipe=recipe, batch=1, sequence=16)
    first, *later = recipe_name.parse_phases(recipe)
    learner = TorchLearner(config, first.recipe, 256)
    learner.step(torch.randint(256, (1, 1, 17)).numpy(), 1e-3)
    trained = list(learner.model.parameters())
    parameters = [t for p in trained for t in (p.tensors() if isinstance(p, QuantizedTensor) else (p,))]
    scales = [value for name, value in learner.model.named_buffers() if name.endswith("weight_scale")]
    own = learner.optimizer
    gradients = [getattr(p.grad, "contents", None) for p in trained]
    gradients = [t for p, g in zip(trained, gradients, strict=True) for t in (g.codes if g else (p.grad,))]
    states = [t for state in own.state.values() for name, t in state.items() if name not in NUMBERS]
    expected = memory.training_footprint(MODELS[model], 256, optimizer, first.recipe, config.dtype, codes=not later)
    assert expected.weight == bytes_of([*parameters, *scales])
    assert expected.gradient == bytes_of(gradients)
    assert expected.additional + expected.moments == bytes_of(states)


def test_presets_use_the_promised_memory() -> None:
    """For the matrices of 8b, under recipes with one set of weight codes for both GEMMs."""
    from quaver.train.commands.plan import optimizers, plan

    for recipe in ("tensorwise", "blockwise", "mxfp8(weight_2d=True)"):
        planned = plan("8b", recipe, "h200")
        number = sum(math.prod(s) for s in memory.projections(MODELS["8b"]).values())
        bytes_an_element = {name: total / number for name, total in optimizers(planned).items()}
        assert bytes_an_element[optimizer_name.TORCH_ADAMW] == 16
        assert (
            bytes_an_element["lean"] <= 5.1
            and bytes_an_element["balanced"] <= 7.1
            and bytes_an_element["exact"] <= 10.1
        )
