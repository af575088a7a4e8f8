"""Mixtures of experts in linen: outputs and gradients of `quaver.torch.MoE`, and of one device on eight."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver.jax import linen as ql
from quaver.jax.blocks.experts import token_counts, update_bias
from quaver.torch.nn.moe.layers import MoE
from tests.close import assert_close

ROOT = Path(__file__).parents[3]
DIM, HIDDEN, EXPERTS, K, SHARED = 64, 96, 8, 2, 32


def array(t: Any) -> Any:
    return jnp.asarray(t.detach().numpy())


def of_torch(block: Any) -> dict[str, Any]:
    """The parameters of a torch mixture, or their gradients, as the linen module has them."""
    first, second = block["experts.gate_up_proj"], block["experts.down_proj"]
    wi = array(first).reshape(EXPERTS, 2, HIDDEN, DIM).transpose(0, 3, 2, 1)
    params = {"router": array(block["router"]).T, "wi": {"kernel": wi}}
    params["wo"] = {"kernel": array(second).transpose(0, 2, 1)}
    if "shared.gate_up_proj" in block:
        shared = array(block["shared.gate_up_proj"]).reshape(2, SHARED, DIM).transpose(2, 1, 0)
        params["shared"] = {"wi": {"kernel": shared}, "wo": {"kernel": array(block["shared.down_proj"]).T}}
        params["shared_gate"] = array(block["shared_gate"]).T
    return params


OPTIONS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity and a shared expert": {"capacity": 0.75, "shared": SHARED, "shared_gate": True},
    "sigmoid in groups": {"scores": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5},
    "rowwise": {"recipe": "rowwise", "pad": 16},
    "mxfp8": {"recipe": "mxfp8", "pad": 32},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_losses_and_gradients_are_those_of_torch(case: str) -> None:
    torch.manual_seed(0)
    options = dict(OPTIONS[case])
    recipe = options.pop("recipe", None)
    config = qt.MixtureConfig(experts=EXPERTS, k=K, return_routing=True, **options)
    block = MoE(DIM, HIDDEN, config, recipe=recipe)
    x = torch.randn(3, 12, DIM, requires_grad=True)
    y, routing = block(x)
    factors = torch.randn(y.shape)
    (y.mul(factors).sum() + qt.balance_loss(routing) + qt.z_loss(routing)).backward()
    named = {name.removesuffix(".weight"): p for name, p in block.named_parameters()}
    params, right = of_torch(named), of_torch({name: p.grad for name, p in named.items()})

    layer = ql.MoE(HIDDEN, EXPERTS, K, recipe=recipe, **options)

    def loss(params: Any, x: Any) -> Any:
        y, sown = layer.apply({"params": params}, x, mutable="losses")
        return (y * array(factors)).sum() + sum(each[0] for each in sown["losses"].values()), y

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, got), (grads, grad_x) = step(params, array(x))
    assert_close("output", got, array(y), 1e-6)
    assert_close("gradient of x", grad_x, array(x.grad), 2e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: assert_close("gradient", a, b, 2e-6), grads, right)


def test_parameters_have_the_shapes_and_names_that_apply_takes() -> None:
    layer = ql.MoE(HIDDEN, EXPERTS, K, use_bias=True, router_bias=True, balance_bias=True, partition=True)
    variables = layer.init(jax.random.key(0), jnp.ones((2, DIM)))
    shapes = jax.tree.map(jnp.shape, jax.tree.map(lambda x: getattr(x, "value", x), variables["params"]))
    assert variables["params"]["wi"]["kernel"].names == ("expert", "embed", "mlp", None)
    assert variables["params"]["wo"]["bias"].names == ("expert", "embed")
    kernels = jax.tree.leaves(variables["params"]["wi"]["kernel"])[0]
    np.testing.assert_allclose(kernels.std((1, 2, 3)), DIM**-0.5, rtol=0.05)
    assert shapes["router"] == (DIM, EXPERTS) and shapes["router_bias"] == (EXPERTS,)
    assert variables["router"]["balance"].shape == (EXPERTS,)


def test_biases_of_experts_are_added_to_their_rows() -> None:
    layer = ql.MoE(HIDDEN, EXPERTS, 1, use_bias=True, return_routing=True)
    x = jax.random.normal(jax.random.key(1), (12, DIM))
    variables = layer.init(jax.random.key(0), x)
    zeros = jax.tree.map(jnp.zeros_like, variables["params"]["wo"]["kernel"])
    bias = jax.random.normal(jax.random.key(2), (EXPERTS, DIM))
    params = {**variables["params"], "wo": {"kernel": zeros, "bias": bias}}
    y, routing = layer.apply({"params": params}, x)
    np.testing.assert_array_equal(y, bias[routing.indices[:, 0]] * routing.weights)


def test_a_balance_bias_moves_tokens_to_idle_experts() -> None:
    layer = ql.MoE(HIDDEN, EXPERTS, K, balance_bias=True, scores="sigmoid", return_routing=True)
    x = 1 + jax.random.normal(jax.random.key(1), (64, DIM))
    variables = layer.init(jax.random.key(0), x)
    before = counts = token_counts(layer.apply(variables, x)[1].indices, EXPERTS)
    assert counts.sum() == 64 * K
    for _ in range(20):
        balance = update_bias(variables["router"]["balance"], counts, 0.02)
        variables = {**variables, "router": {"balance": balance}}
        counts = token_counts(layer.apply(variables, x)[1].indices, EXPERTS)
    assert counts.max() < before.max()
    expected = torch.zeros(EXPERTS)
    qt.update_bias(expected, torch.tensor(np.asarray(before)), 0.02)
    np.testing.assert_array_equal(update_bias(jnp.zeros(EXPERTS), before, 0.02), expected.numpy())


def test_wrong_options_raise_errors() -> None:
    x = jnp.ones((6, DIM))
    for options, message in (
        ({"capacity": 0.0}, "capacity is 0.0, which drops every token"),
        ({"shared_gate": True}, "shared is 0"),
        ({"expert_axis": "expert"}, "the mesh has no axes"),
    ):
        with pytest.raises(ValueError, match=message):
            ql.MoE(HIDDEN, EXPERTS, K, **options).init(jax.random.key(0), x)


def test_eight_devices_give_the_outputs_and_gradients_of_one() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.linen.eight_experts"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"cases": 3}
