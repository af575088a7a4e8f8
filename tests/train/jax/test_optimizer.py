import jax.numpy as jnp
import numpy as np
import pytest
import torch

from quaver.train.jax.learner import Moments, adamw, norm_of, rates, zero_moments
from quaver.train.torch.optimizer import adamw as torchs
from tests.train.conftest import MakeConfig


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_it_is_torchs_adamw(make_config: MakeConfig, clip: float) -> None:
    config = make_config(clip=clip, beta2=0.999)
    random = np.random.default_rng(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.RMSNorm(8))
    optimizer = torchs(model, config)
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    moments = zero_moments(params)
    for update in range(1, 8):
        grads = {name: random.standard_normal(p.shape, np.float32) for name, p in params.items()}
        for name, p in model.named_parameters():
            p.grad = torch.tensor(grads[name])
        its_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.01 * update
        optimizer.step()
        ours = {name: jnp.asarray(g) for name, g in grads.items()}
        norm = norm_of(ours)
        params, moments = adamw(params, moments, ours, norm, rates(0.01 * update, update, config))
        assert float(norm) == pytest.approx(its_norm.item(), rel=1e-6)
        for name, p in model.named_parameters():
            np.testing.assert_allclose(params[name], p.detach().numpy(), rtol=2e-6, atol=1e-7)
            state = optimizer.state[p]
            np.testing.assert_allclose(moments.first[name], state["exp_avg"].numpy(), rtol=2e-6, atol=1e-7)
            np.testing.assert_allclose(moments.second[name], state["exp_avg_sq"].numpy(), rtol=2e-6, atol=1e-9)
    assert isinstance(moments, Moments)
