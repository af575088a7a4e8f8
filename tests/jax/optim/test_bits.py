"""`quaver.jax.optim` has the codes, scales and weights of `quaver.torch.optim.AdamW`, bit by bit, on hard values."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from quaver.jax import optim
from quaver.torch.optim import AdamW

#: Whole blocks; rows that are no multiple of four; a convolution; a column; a vector; a number; nothing.
SHAPES = ((64, 128), (70, 66), (16, 32, 3, 3), (5000, 1), (5,), (), (0, 7))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ("normal", "zero", "sparse", "huge", "nan", "crossing")
LR, SEED = 2.0**-7, 0x123456789


def gradient(kind: str, shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    g = rng.normal(size=shape) * np.exp2(rng.integers(-8, 9, shape))
    if kind == "zero":
        g = g * 0
    elif kind == "sparse":
        g = g * (rng.random(shape) < 0.1)
    elif kind == "huge":
        g = g * np.exp2(rng.integers(0, 4 if dtype is torch.float16 else 110, shape))
    elif kind == "tiny":
        g = g * np.exp2(rng.integers(-146, -60, shape).astype(np.float64))
    elif kind == "nan" and g.size > 20:
        g.flat[3], g.flat[17] = np.nan, np.inf
    return torch.tensor(g, dtype=torch.float32).to(dtype)


def weight(kind: str, shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Normal weights and zeros, or such that the first step ends near zero."""
    w = rng.normal(size=shape) * 0.05 * (rng.random(shape) < 0.9)
    if kind == "crossing":
        w = np.sign(w) * LR * (1 + rng.integers(-3, 4, shape) * 2.0**-7)
    return torch.tensor(w, dtype=torch.float32).to(dtype)


def array(t: torch.Tensor) -> Any:
    """The same bits in numpy; bfloat16 as JAX's."""
    if t.dtype is torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    return t.contiguous().numpy()


def equal(a: Any, b: Any, message: str) -> None:
    """Equal bits, and NaN for NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), message
    nan = (a != a) & (b != b)
    bits = np.dtype(f"u{a.itemsize}")
    np.testing.assert_array_equal(np.where(nan, 0, a.view(bits)), np.where(nan, 0, b.view(bits)), err_msg=message)


def program(preset: str, dtype: str) -> tuple[Any, Any, Any]:
    """A preset without quantized gradients, its transformation, and a compiled step."""
    # JAX stores no gradients between backward and step.
    formats = replace(optim.PRESETS[preset], gradient="float32")
    tx = optim.adamw(LR, preset=formats, seed=SEED)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return formats, tx, jax.jit(step)


def reached(old: Any, new: Any) -> Any:
    """What `optax.apply_updates` makes of the update from one weight to another: p + u in float32, rounded."""
    wide_old, wide_new = np.asarray(old).astype(np.float32), new.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        total = (wide_old + (wide_new - wide_old)).astype(new.dtype)
    return np.where(wide_old == wide_new, new, total)


def compare_state(state: Any, i: int, of_torch: Any, residual: bool, message: str) -> None:
    """Compare moments, scales, and the residual."""
    for moment in ("exp_avg", "exp_avg_sq"):
        codes = of_torch.get(f"{moment}_codes", of_torch.get(moment))
        equal(getattr(state, moment)[i], array(codes), f"{message} {moment}")
        scale = getattr(state, f"{moment}_scale")[i]
        assert (scale is None) == (f"{moment}_scale" not in of_torch)
        if scale is not None:
            equal(scale, array(of_torch[f"{moment}_scale"]).reshape(scale.shape), f"{message} {moment}_scale")
    rest = [of_torch[key] for key in ("residual", "remainder", "master") if key in of_torch]
    assert (state.residual[i] is None) == (not rest)
    if rest and residual:
        equal(state.residual[i], array(rest[0]), f"{message} residual")


def check(preset: str, dtype: str, kinds: tuple[str, ...] = KINDS) -> None:
    formats, tx, step = program(preset, dtype)
    for kind in kinds:
        rng = np.random.default_rng(0)
        parameters = [torch.nn.Parameter(weight(kind, shape, DTYPES[dtype], rng)) for shape in SHAPES]
        optimizer = AdamW(parameters, lr=LR, preset=formats, seed=SEED)
        params = [jnp.asarray(array(p.detach().clone())) for p in parameters]
        state = tx.init(params)
        for count in range(1 if kind == "crossing" else 4):
            grads = [gradient(kind, shape, DTYPES[dtype], rng) for shape in SHAPES]
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
            before = params
            params, state = step(params, state, [array(g) for g in grads])
            for i, p in enumerate(parameters):
                message, right = f"{preset} {dtype} {kind} {count} {tuple(p.shape)}", array(p.detach())
                expected = reached(before[i], right)
                differs = (expected != right) & (right == right)
                if kind == "tiny":
                    # A change of a weight below 2**-126 counts as zero.
                    np.testing.assert_allclose(np.float32(params[i]), np.float32(right), rtol=2.0**-7, atol=2.0**-120)
                else:
                    equal(params[i], expected, message)
                    assert dtype == "float32" or differs.sum() <= (differs.size // 1000 if kind == "crossing" else 0)
                compare_state(state, i, optimizer.state[p], kind != "tiny", message)
            if dtype == "float32":
                params = [jnp.asarray(array(p.detach().clone())) for p in parameters]


@pytest.mark.parametrize(("preset", "dtype"), [("lean", "bfloat16"), ("balanced", "bfloat16"), ("exact", "float32")])
def test_steps_are_those_of_torch(preset: str, dtype: str) -> None:
    check(preset, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", ["lean", "balanced", "exact", "float32", "flashoptim", "te"])
def test_every_preset_and_dtype_steps_as_torch(preset: str, dtype: str) -> None:
    check(preset, dtype)


def test_moments_of_subnormal_gradients_are_those_of_torch() -> None:
    check("lean", "bfloat16", ("tiny",))


def test_gradients_of_another_dtype_and_ascent_step_as_torch() -> None:
    rng = np.random.default_rng(0)
    parameter = torch.nn.Parameter(weight("normal", (64, 128), torch.float32, rng))
    optimizer = AdamW([parameter], lr=LR, betas=(0.3, 0.95), eps=1e-3, weight_decay=0.5, preset="exact", maximize=True)
    tx = optim.exact(LR, (0.3, 0.95), 1e-3, 0.5, maximize=True)
    params = jnp.asarray(array(parameter.detach().clone()))
    state = tx.init(params)
    parameter.grad = gradient("normal", (64, 128), torch.bfloat16, rng).float()
    optimizer.step()
    updates, state = jax.jit(tx.update)(jnp.asarray(array(parameter.grad.bfloat16())), state, params)
    right = array(parameter.detach())
    np.testing.assert_allclose(optax.apply_updates(params, updates), right, rtol=0, atol=2.0**-26)
    equal(state.exp_avg, array(optimizer.state[parameter]["exp_avg"]), "exp_avg")
    equal(state.exp_avg_sq, array(optimizer.state[parameter]["exp_avg_sq"]), "exp_avg_sq")
