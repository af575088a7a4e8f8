"""Modules of mixtures of experts in linen and NNX, beside PyTorch's and on eight devices."""

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
from flax import nnx

import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
import quaver.torch as qt
from tests.close import assert_close

# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
D, H, E, K = 32, 64, 4, 2
X = np.random.default_rng(0).standard_normal((3, 16, D)).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "shared, gate, capacity": {"shared": 48, "shared_gate": True, "capacity": 0.75},
    "sigmoid, groups, biases": {
        "scores": "sigmoid", "groups": 2, "top_groups": 1, "best_of_group": 2, "scale": 2.5, "router_bias": True,
        "balance_bias": True,
    },
}  # fmt: skip


def linen(options: dict[str, Any], **more: Any) -> Any:
    return ql.MoE(H, experts=E, k=K, return_routing=True, **options, **more)


def filled(model: Any) -> Any:
    """Variables with random values everywhere."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, KEY, X)
    draw = lambda p: jnp.asarray(0.2 * random.standard_normal(p.shape), jnp.float32)  # noqa: E731
    state = {k: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), v) for k, v in shapes.items()}
    return state | {k: jax.tree.map(draw, v) for k, v in shapes.items() if k in ("params", "router_balance")}


def of_torch(variables: Any, options: dict[str, Any]) -> Any:
    """The same mixture in PyTorch, float64."""
    config = qt.MixtureConfig(experts=E, k=K, return_routing=True, **options)
    model = qt.MoE(D, H, config, normalization=None, dtype=torch.float64)
    params = variables["params"]
    tensor = lambda a: torch.from_numpy(np.array(a, np.float64))  # noqa: E731
    wi = np.moveaxis(np.asarray(params["wi"]["kernel"]), 3, 1)  # [E, 2, D, H]
    state = {
        "router.weight": tensor(params["router"]).T,
        "experts.gate_up_proj.weight": tensor(wi.transpose(0, 1, 3, 2).reshape(E, 2 * H, D)),
        "experts.down_proj.weight": tensor(params["wo"]["kernel"]).transpose(1, 2),
    }
    if "router_bias" in params:
        state["router.bias"] = tensor(params["router_bias"])
        state["router.balance"] = torch.from_numpy(np.array(variables["router_balance"]["balance"]))
    if "shared" in params:
        shared = np.asarray(params["shared"]["wi"]["kernel"])  # [D, H, 2]
        names = [name for name in model.state_dict() if name.startswith("shared.")]
        assert len(names) == 2, names
        state[names[0]] = tensor(shared.transpose(2, 1, 0).reshape(-1, D))
        state[names[1]] = tensor(params["shared"]["wo"]["kernel"]).T
        state["shared_gate.weight"] = tensor(params["shared_gate"]).T
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_equal_those_of_torch(case: str) -> None:
    model = linen(OPTIONS[case])
    variables = filled(model)
    theirs = of_torch(variables, OPTIONS[case])
    x = torch.from_numpy(X).double().requires_grad_()
    expected, routing = theirs(x)
    expected.square().sum().backward()

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, routing = model.apply({**variables, "params": params}, x)
            return jnp.square(y).sum(), (y, routing)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (of_params, of_x), (y, own) = run(variables["params"], X)
    np.testing.assert_array_equal(own.indices, routing.indices.numpy())
    assert_close("output", y, expected.detach().numpy(), 1e-6)
    assert_close("input", of_x, x.grad.numpy(), 2e-6)
    assert_close("router", of_params["router"], theirs.router.weight.grad.numpy().T, 1e-5)
    assert_close("wo", of_params["wo"]["kernel"], theirs.experts.down_proj.weight.grad.numpy().swapaxes(1, 2), 2e-6)
    for loss in ("balance_loss", "z_loss"):
        assert_close(loss, getattr(qj, loss)(own), getattr(qt, loss)(routing).detach().numpy(), 1e-5)
    counts = qj.token_counts(own.indices, E)
    np.testing.assert_array_equal(counts, qt.token_counts(routing.indices, E).numpy())
    bias = torch.zeros(E)
    qt.update_bias(bias, torch.from_numpy(np.array(counts)))
    np.testing.assert_array_equal(qj.updated_bias(jnp.zeros(E), counts), bias.numpy())


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed"])
def test_linen_and_nnx_train_the_same_under_a_recipe(recipe: str) -> None:
    options = {"shared": 48, "balance_bias": True}
    model = linen(options, recipe=recipe)
    variables = filled(model)
    own = qn.MoE(D, H, experts=E, k=K, return_routing=True, **options, recipe=recipe, rngs=nnx.Rngs(0))
    nnx.update(own, nnx.State(variables["params"]))
    own.balance[...] = variables["router_balance"]["balance"]
    step = jax.jit(jax.value_and_grad(lambda v: jnp.square(model.apply(v, X)[0]).mean(), allow_int=True))
    value, gradients = step(variables)
    of_nnx = nnx.jit(lambda m, x: qn.value_and_grad(lambda m: jnp.square(m(x)[0]).mean())(m))(own, X)
    assert_close("loss", of_nnx[0], value, 1e-6)
    for name in ("wi", "wo"):
        assert_close(name, of_nnx[1][name]["kernel"][...], gradients["params"][name]["kernel"], 1e-5)
    if recipe == "delayed":
        recorded = own.wi.state.history[...]
        np.testing.assert_allclose(recorded, gradients[ql.COLLECTION]["wi"]["history"], rtol=1e-5)
        assert (recorded[-1] > 0).all()
    plain = jnp.square(linen(options).apply({k: v for k, v in variables.items() if k != ql.COLLECTION}, X)[0]).mean()
    assert 0 < abs(float(value - plain)) < 0.05 * float(plain)


def test_options_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="no shared_gate"):
        jax.eval_shape(linen({"shared_gate": True}).init, KEY, X)
    with pytest.raises(ValueError, match="drops every token"):
        qn.MoE(D, H, experts=E, k=K, capacity=0.0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="in which steps of"):
        qj.updated_bias(jnp.zeros(E, jnp.bfloat16), jnp.zeros(E, jnp.int32))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from flax import linen as nn
from jax.sharding import AxisType
import quaver.jax.linen as ql

model = ql.MoE(64, experts=8, k=2, shared=64, partition=True, recipe="mxfp8")
x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16, 32)), jnp.float32)
boxed = model.init(jax.random.key(0), x)
variables = nn.unbox(boxed)
step = jax.jit(jax.value_and_grad(lambda v, x: jnp.square(model.apply(v, x)).mean()))
expected = step(variables, x)
mesh = jax.make_mesh((4, 2), ("expert", "data"), axis_types=(AxisType.Auto,) * 2)
rules = (("expert", "expert"), ("embed", None), ("mlp", None))
shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
assert shardings["params"]["wi"]["kernel"].spec[0] == "expert"
with jax.set_mesh(mesh):
    got = step(jax.device_put(variables, shardings), jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 * float(jnp.abs(a).max()))
"""


def test_experts_sharded_over_a_mesh_axis_give_the_numbers_of_one_device() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
