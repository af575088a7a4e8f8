"""`quaver.jax.optim` inside optax, Flax and orbax; bytes, donation, masks and errors."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from quaver.jax import optim
from quaver.reference.optimizer_state import matrix_footprint

ROOT = Path(__file__).parents[3]
LR = 2.0**-7


def tree(seed: int = 0, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"b": jnp.asarray(rng.normal(size=64), dtype), "w": jnp.asarray(rng.normal(size=(64, 128)), dtype)}


def train(tx: Any, grads: Any = None, steps: int = 2, params: Any = None) -> tuple[Any, Any]:
    """Parameters and state after some steps with the same gradients."""
    params, grads = tree() if params is None else params, tree(1) if grads is None else grads

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@cache
def plain() -> tuple[Any, Any]:
    return train(optim.lean(LR))


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def bytes_of(*trees: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trees))


@pytest.mark.parametrize(("preset", "most"), [("lean", 5.1), ("balanced", 6.1), ("exact", 8.0)])
def test_bytes_of_a_parameter_and_its_state_are_those_of_torch(preset: str, most: float) -> None:
    p = jnp.zeros((64, 128), jnp.bfloat16)
    state = optim.adamw(preset=preset).init(p)
    footprint = matrix_footprint(optim.PRESETS[preset], (64, 128), "bfloat16")
    assert bytes_of(p, state) - 4 == footprint.total - footprint.gradient
    assert bytes_of(p, state) - 4 <= most * p.size


def test_a_step_reuses_the_buffers_of_parameters_and_state() -> None:
    tx, params = optim.lean(LR), {"w": jnp.ones((64, 128), jnp.bfloat16)}

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, grads = tx.init(params), {"w": jnp.ones((64, 128), jnp.bfloat16)}
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_of(params, state)
    addresses = {x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.ndim}
    after = compiled(params, state, grads)
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(after) if x.ndim} == addresses
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_updates_are_the_same_outside_jit() -> None:
    tx, params = optim.lean(LR), tree()
    updates, state = tx.update(tree(1), tx.init(params), params)
    compiled = jax.jit(tx.update)(tree(1), tx.init(params), params)
    same((updates, state), compiled)


def test_parameters_without_gradient_stay() -> None:
    tx, params = optim.lean(LR), {**tree(), "none": None}
    state = tx.init(params)
    updates, after = tx.update({**tree(1), "b": None, "none": None}, state, params)
    assert updates["b"] is None
    same(after.exp_avg["b"], state.exp_avg["b"])
    assert np.any(np.asarray(after.exp_avg["w"]) != np.asarray(state.exp_avg["w"]))


@pytest.mark.parametrize("mask", [{"w": True, "b": False}, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)])
def test_masked_parameters_do_not_decay(mask: Any) -> None:
    params, _ = train(optim.lean(LR, weight_decay=0.5, mask=mask))
    same(params["w"], train(optim.lean(LR, weight_decay=0.5))[0]["w"])
    same(params["b"], train(optim.lean(LR, weight_decay=0.0))[0]["b"])


def test_learning_rates_may_be_schedules_and_injected() -> None:
    seen = []

    def schedule(count: Any) -> Any:
        seen.append(count)
        return optax.linear_schedule(0.0, LR, 1)(count)

    params, state = train(optim.lean(schedule), steps=1)
    same(params, tree())
    assert seen and state.count == 1
    injected = optax.inject_hyperparams(optim.lean, hyperparam_dtype=jnp.float32)(learning_rate=LR)
    params, state = train(injected)
    same(params, plain()[0])
    assert state.hyperparams["learning_rate"] == LR


def test_gradients_accumulate_in_multi_steps() -> None:
    params, state = train(optax.MultiSteps(optim.lean(LR), 2), steps=4)
    same((params, state.inner_opt_state), plain())


def test_non_finite_gradients_are_skipped() -> None:
    """By `optax.apply_if_finite`, whose gradients must be float32 like the updates."""
    grads = tree(1, jnp.float32)
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), grads)
    params, state = train(optax.apply_if_finite(optim.lean(LR), 5), rounded)
    same((params, state.inner_state), plain())
    grads["b"] = grads["b"].at[0].set(jnp.nan)
    params, state = train(optax.apply_if_finite(optim.lean(LR), 5), grads)
    same(params, tree())
    assert state.total_notfinite == 2


def test_masks_partitions_and_chains_reach_their_parameters() -> None:
    params, state = train(optax.masked(optim.lean(LR), {"w": True, "b": False}))
    assert len(jax.tree.leaves(state.inner_state.exp_avg)) == 1
    both = optax.partition({"q": optim.lean(LR), "frozen": optax.set_to_zero()}, {"w": "q", "b": "frozen"})
    params, _ = train(both)
    same(params["b"], tree()["b"])
    assert np.any(np.asarray(params["w"]) != np.asarray(tree()["w"]))
    clipped, _ = train(optax.chain(optax.clip_by_global_norm(1e6), optim.lean(LR)))
    same(clipped, plain()[0])


def test_flax_trainers_step() -> None:
    state = TrainState.create(apply_fn=lambda: None, params=tree(), tx=optim.lean(LR))
    for _ in range(2):
        state = state.apply_gradients(grads=tree(1))
    same((state.params, state.opt_state), plain())
    model = nnx.Linear(64, 128, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    optimizer = nnx.Optimizer(model, optim.lean(LR), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((2, 64))).sum())(model))

    step(model, optimizer)
    assert model.kernel.dtype == jnp.bfloat16 and np.any(np.asarray(model.kernel[...]) != np.asarray(before))


def test_states_follow_the_partitioning_names_of_parameters() -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    params = nn.Dense(128, param_dtype=jnp.bfloat16, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 64)))
    spec = nn.get_partition_spec(jax.eval_shape(optim.lean(LR).init, params["params"]))
    expected = jax.sharding.PartitionSpec(None, "model")
    assert spec.exp_avg["kernel"] == spec.exp_avg_scale["kernel"] == spec.residual["kernel"] == expected


def test_states_are_restored_from_orbax(tmp_path: Path) -> None:
    saved = dict(zip(("params", "state"), plain(), strict=True))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "step", like), saved)


def test_wrong_arguments_raise_errors() -> None:
    with pytest.raises(ValueError, match=r"betas is \(0.9, 1.0\)"):
        optim.lean(betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="preset 'leen' is not known"):
        optim.adamw(preset="leen")
    with pytest.raises(ValueError, match=r"int32.*leave it out"):
        optim.lean().init(jnp.zeros((3,), jnp.int32))
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        optim.lean().update(tree(1), optim.lean().init(tree()))
    with pytest.raises(ValueError, match="float16 with one scale"):
        optim.adamw(preset=optim.Preset(name="own", bfloat16="float16"))


def test_without_optax_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['optax'] = None\nimport quaver.jax, quaver.jax.optim"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'quaver[flax]'" in done.stderr


def test_eight_devices_step_as_one() -> None:
    """Bit by bit, with states sharded like their parameters, and without communication if shards are whole blocks."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.optim.eight_devices"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
