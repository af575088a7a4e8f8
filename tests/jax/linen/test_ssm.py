"""The Mamba-2 block in linen: outputs and gradients of `quaver.torch.Mamba2`, padding, and decoding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from quaver.jax import linen as ql
from quaver.jax.blocks.ssm import first_state
from quaver.torch.nn.ssm.mamba2 import Mamba2
from tests.close import assert_close

DIM = 48
SIZES: dict[str, Any] = {"head_dim": 16, "state": 24}
OPTIONS: dict[str, dict[str, Any]] = {
    "gate first": {},
    "norm first, two groups": {"gate": "norm_first", "groups": 2},
    "no norm": {"gate": "no_norm", "dt_limit": (1e-3, 0.05)},
    "rowwise": {"recipe": "rowwise"},
    "mxfp8": {"recipe": "mxfp8"},
}


def array(t: Any) -> Any:
    return jnp.asarray(t.detach().numpy())


def of_torch(block: Any) -> dict[str, Any]:
    """The parameters of a torch block, or their gradients, as the linen module has them."""
    params = {name: array(block[name]) for name in ("dt_bias", "A_log", "D")}
    params |= {name: {"kernel": array(block[f"{name}.weight"]).T} for name in ("in_proj", "out_proj")}
    params |= {"kernel": array(block["conv1d.weight"]).transpose(2, 1, 0), "bias": array(block["conv1d.bias"])}
    return params | ({"scale": array(block["gated_norm.weight"])} if "gated_norm.weight" in block else {})


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_those_of_torch(case: str) -> None:
    torch.manual_seed(0)
    block = Mamba2(dim=DIM, **SIZES, **OPTIONS[case])
    x = torch.randn(2, 70, DIM, requires_grad=True)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[0, :9] = True
    y = block(x, mask=mask)
    factors = torch.randn(y.shape).masked_fill(mask[..., None], 0)
    y.mul(factors).sum().backward()
    params = of_torch(dict(block.named_parameters()))
    right = of_torch({name: p.grad for name, p in block.named_parameters()})
    layer = ql.Mamba2(**SIZES, **OPTIONS[case])
    shapes = jax.eval_shape(layer.init, jax.random.key(0), array(x))["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

    def loss(params: Any, x: Any) -> Any:
        y = layer.apply({"params": params}, x, mask=jnp.asarray(mask.numpy()))
        return (y * array(factors)).sum(), y

    (grads, grad_x), got = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, array(x))
    assert_close("output", got[0, 9:], array(y)[0, 9:], 1e-6)
    assert_close("output", got[1], array(y)[1], 1e-6)
    assert_close("gradient of x", grad_x, array(x.grad), 2e-6)
    jax.tree.map(lambda a, b: assert_close("gradient", a, b, 2e-6), grads, right)


def test_decoding_token_by_token_gives_the_outputs_of_the_sequence() -> None:
    layer = ql.Mamba2(**SIZES, conv_bias=False, use_bias=True, out_bias=False, partition=True)
    x = jax.random.normal(jax.random.key(1), (2, 7, DIM))
    variables = layer.init(jax.random.key(0), x)
    assert "bias" in variables["params"]["in_proj"] and "bias" not in variables["params"]["out_proj"]
    assert variables["params"]["in_proj"]["kernel"].names == ("embed", "mlp")
    state = first_state(layer, DIM, 2)
    run = jax.jit(lambda x, state: layer.apply(variables, x, state=state))
    outputs = []
    for t in range(7):
        y, state = run(x[:, t : t + 1], state)
        outputs.append(y)
    assert_close("y", jnp.concatenate(outputs, 1), layer.apply(variables, x), 1e-6)


def test_initial_steps_and_decays_are_in_their_ranges() -> None:
    layer = ql.Mamba2(head_dim=4, state=8, inner=1024, dt_range=(0.01, 0.02), A_range=(2.0, 3.0))
    params = layer.init(jax.random.key(0), jnp.ones((1, 2, DIM)))["params"]
    steps = np.asarray(jax.nn.softplus(params["dt_bias"]))
    assert 0.0099 < steps.min() < 0.011 and 0.019 < steps.max() < 0.0201
    decays = np.exp(params["A_log"])
    assert 2 <= decays.min() < 2.1 and 2.9 < decays.max() <= 3


def test_wrong_options_raise_errors() -> None:
    x = jnp.ones((1, 4, DIM))
    for options, message in (
        ({"head_dim": 7}, "do not divide into heads of 7"),
        ({"head_dim": 32, "groups": 2}, "3 heads cannot share 2 groups"),
        ({"head_dim": 16, "gate": "none"}, "gate is 'none'"),
        ({"head_dim": 16, "chunk_size": 0}, "chunk_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ql.Mamba2(**options).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="True where a token is padding"):
        ql.Mamba2(**SIZES).init(jax.random.key(0), x, mask=jnp.ones((1, 3), bool))
