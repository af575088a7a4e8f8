"""One update runs on the device only and can be recorded; unsupported recordings raise a clear error."""

import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver.recipes import get
from quaver.torch.state import weight_cache
from quaver.train.config import TrainConfig
from quaver.train.torch.learner import TorchLearner


def learner(**options: str) -> TorchLearner:
    config = TrainConfig(recipe="tensorwise", model="nano", device="cpu", accumulate=2, **options)  # type: ignore[arg-type]
    return TorchLearner(config, get("tensorwise"), 256)


def batch() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 2, 17))


def test_a_loss_that_is_not_finite_updates_nothing_and_keeps_its_gradients() -> None:
    trained = learner()
    trained.step(batch(), 1e-3)
    head = trained.model.get_parameter("head.weight")
    with torch.no_grad():
        head[0, 0] = torch.nan
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    moments = {name: value.copy() for name, value in trained.tensors()[1].items()}
    loss, _ = trained.step(batch(), 1e-3)
    assert np.isnan(loss)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name
    for name, array in trained.tensors()[1].items():
        np.testing.assert_array_equal(array, moments[name], err_msg=name)
    assert "gradient that is not finite is that of" in trained.first_gradient(batch())


def test_only_a_gpu_captures_a_step() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="no CUDA device"):
        qt.CapturedStep(lambda: None)
    with pytest.raises(ValueError, match="no CUDA device"):
        learner(capture="step")
    with pytest.raises(ValueError, match="did you mean 'step'"):
        TrainConfig(capture="steps")


def test_a_replayed_step_drops_cached_weights() -> None:
    layer = qt.Linear(4, 4)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    spec = get("tensorwise").fprop.b
    assert spec is not None
    window = weight_cache.begin(layer, weight)
    entry = weight_cache.store(layer, "fprop", weight, spec, 0.0, qt.quantize(weight, spec), window)
    assert entry is not None and weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is entry
    weight_cache.count_step()
    assert weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is None
