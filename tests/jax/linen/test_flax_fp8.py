"""What Flax's guide "FP8 basics" and its TrainState show, with our operations in place of Flax's.

The guide: flax-linen.readthedocs.io, guides/quantization/fp8_basics.
"""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
from tests.close import assert_bitwise

KEY = jax.random.key(0, impl="unsafe_rbg")
A = jnp.asarray(np.random.default_rng(0).uniform(size=(16, 32)), jnp.float32)
DELAYED = quaver.recipes.delayed(history=4)


@pytest.fixture(scope="module")
def model() -> nn.Dense:
    return nn.Dense(features=64, dot_general_cls=ql.dot_general_cls(DELAYED))


@pytest.fixture(scope="module")
def gradients(model: nn.Dense) -> Any:
    def train_step(variables: Any, a: Any) -> Any:
        return jnp.sum(model.apply(variables, a))

    return jax.jit(jax.grad(train_step, (0, 1)))


def test_dense_stores_its_state_where_flax_does(model: nn.Dense) -> None:
    variables = jax.jit(model.init)(KEY, A)
    assert set(variables) == {"params", fp8_ops.OVERWRITE_WITH_GRADIENT}
    assert set(variables["params"]) == {"kernel", "bias"}
    assert jax.tree.map(jnp.shape, variables[fp8_ops.OVERWRITE_WITH_GRADIENT]) == {
        "DotGeneral_0": {"history": (4, 3), "factor": (3,)}
    }
    flaxs = jax.jit(nn.Dense(features=64, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp).init)(KEY, A)
    assert set(flaxs) == set(variables)
    assert_bitwise(flaxs["params"]["kernel"], variables["params"]["kernel"])


def test_the_manual_update_of_the_guide_works(model: nn.Dense, gradients: Any) -> None:
    params = jax.jit(model.init)(KEY, A)
    grads, _ = gradients(params, A)
    old = flax.traverse_util.flatten_dict(params, sep="/")
    new = flax.traverse_util.flatten_dict(grads, sep="/")
    updated = {
        key: new[key] if key.startswith("_overwrite_with_gradient") else value + 0.01 * new[key]
        for key, value in old.items()
    }
    params = flax.core.freeze(flax.traverse_util.unflatten_dict(updated, sep="/"))
    state = params["_overwrite_with_gradient"]["DotGeneral_0"]
    assert state["history"][3].tolist() == [A.max(), jnp.abs(old["params/kernel"]).max(), 1.0]
    assert (state["factor"] > 0).all()
    gradients(flax.core.unfreeze(params), A)


def test_train_state_overwrites_the_state_and_keeps_it_from_the_optimizer(model: nn.Dense, gradients: Any) -> None:
    state = TrainState.create(apply_fn=model.apply, params=jax.jit(model.init)(KEY, A), tx=optax.adam(1e-2))
    assert "_overwrite_with_gradient" not in str(jax.tree.structure(state.opt_state))
    for _ in range(3):
        grads, _ = gradients(state.params, A)
        state = state.apply_gradients(grads=grads)
        assert_bitwise(
            state.params["_overwrite_with_gradient"]["DotGeneral_0"]["history"],
            grads["_overwrite_with_gradient"]["DotGeneral_0"]["history"],
        )
    assert (state.params["_overwrite_with_gradient"]["DotGeneral_0"]["history"][1:, 0] == A.max()).all()


def test_the_result_is_linears(model: nn.Dense, gradients: Any) -> None:
    variables = jax.jit(model.init)(KEY, A)
    p, state = variables["params"], variables["_overwrite_with_gradient"]["DotGeneral_0"]
    expected = qj.linear(A, p["kernel"], recipe=DELAYED, state=state)
    assert_bitwise(jax.jit(model.apply)(variables, A), expected + p["bias"])
    # E5M2 gradients of ones are exact, so these are products with the kernel's and input's codes.
    grads, grad_input = gradients(variables, A)
    tensorwise = nn.Dense(features=64, dot_general_cls=ql.dot_general_cls("tensorwise"))
    same, same_input = jax.jit(jax.grad(lambda p, a: tensorwise.apply({"params": p}, a).sum(), (0, 1)))(p, A)
    assert_bitwise(grads["params"]["kernel"], same["kernel"])
    assert_bitwise(grad_input, same_input)


def test_eight_bit_dots_are_in_the_program_for_a_gpu(model: nn.Dense) -> None:
    shapes = jax.eval_shape(model.init, KEY, A)
    step = jax.jit(jax.value_and_grad(lambda v, a: jnp.square(model.apply(v, a)).sum(), (0, 1)))
    program = step.trace(shapes, A).lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in program.splitlines() if "dot_general" in line]
    assert len(dots) == 3 and all("f8E4M3FN" in line for line in dots), "\n".join(dots)
    assert sum("f8E5M2" in line for line in dots) == 2


def test_parameters_used_twice_take_the_maximum() -> None:
    """The guide's last section: 3, not 5."""
    kernel = jnp.ones((1, 1))
    before = qj.state.init(DELAYED)

    def reuse(state: Any) -> Any:
        shared = qj.state.share(state, 2)
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], shared) for i in range(2))
        x = qj.linear(jnp.full((1, 1), 2.0), kernel, recipe=DELAYED, state=first)
        y = qj.linear(jnp.full((1, 1), 3.0), kernel, recipe=DELAYED, state=second)
        return (x + y).sum()

    after = jax.jit(jax.grad(reuse))(before)
    assert after["history"][:, 0].tolist() == [0, 0, 0, 3]


class Mixer(nn.Module):
    """A model that takes an einsum, as some take fp8_ops.Fp8Einsum."""

    einsum_cls: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(), (32, 4, 8))
        return self.einsum_cls()("td,dhk->thk", x, kernel)


def test_einsum_works_where_flax_einsum_works() -> None:
    ours, flaxs = Mixer(ql.einsum_cls(DELAYED)), Mixer(fp8_ops.Fp8Einsum)
    variables = jax.jit(ours.init)(KEY, A)
    assert set(variables) == set(jax.jit(flaxs.init)(KEY, A))
    assert set(variables["_overwrite_with_gradient"]) == {"Einsum_0"}
    kernel = variables["params"]["kernel"]
    state = variables["_overwrite_with_gradient"]["Einsum_0"]
    expected = qj.linear(A, kernel.reshape(32, 32), recipe=DELAYED, state=state).reshape(16, 4, 8)
    assert_bitwise(ours.apply(variables, A), expected)


def test_flaxs_attention_takes_it_for_all_four_projections() -> None:
    op = ql.dot_general_cls("tensorwise")
    model = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=op, out_dot_general_cls=op)
    x = A[None]
    variables = jax.eval_shape(model.init, KEY, x)
    assert set(variables) == {"params"}
    assert str(jax.make_jaxpr(model.apply)(variables, x)).count("custom_vjp_call[") == 4
    with qj.autocast(enabled=False):
        assert str(jax.make_jaxpr(model.apply)(variables, x)).count("custom_vjp_call[") == 0


def test_the_slot_takes_the_ambient_recipe_too_and_names_are_checked_at_once() -> None:
    model = nn.Dense(8, dot_general_cls=ql.dot_general_cls())
    variables = jax.jit(model.init)(KEY, A)
    assert set(variables) == {"params"}
    with qj.autocast(DELAYED):
        assert set(jax.eval_shape(model.init, KEY, A)) == {"params", ql.COLLECTION}
        with pytest.raises(ValueError, match="DotGeneral DotGeneral_0 under recipe 'delayed' needs its state"):
            model.apply(variables, A)
    with pytest.raises(ValueError, match="did you mean 'tensorwise'"):
        ql.dot_general_cls("tensorwize")
