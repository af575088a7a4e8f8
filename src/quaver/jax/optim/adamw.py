"""AdamW with quantized states as an optax gradient transformation.

Codes, scales and weights equal those of `quaver.torch.optim.AdamW` under the same preset, seed and gradients.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from quaver.jax.optim.step import Layout, LeafState, Scalars, step
from quaver.reference.optimizer_state import Preset, preset_of


class AdamWState(NamedTuple):
    """State of `adamw`; trees have the structure of the parameters, with None where nothing is stored."""

    #: Number of steps, int32 [].
    count: Array  # type: ignore[assignment]
    #: Moments: codes of the parameter's shape, or bfloat16 or float32.
    exp_avg: Any
    exp_avg_sq: Any
    #: Scales of codes: the parameter's shape, with blocks instead of columns.
    exp_avg_scale: Any
    exp_avg_sq_scale: Any
    #: What the low precision of a weight lost: int8 or int16 for bfloat16, a float32 master for float16.
    residual: Any


def adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 1e-2,
    *,
    preset: str | Preset = "balanced",
    mask: Any = None,
    maximize: bool = False,
    seed: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with moments in a preset's formats, for `optax.apply_updates`.

    Vectors and parameters of fewer than 4096 elements have float32 moments with any preset. bfloat16 parameters have a
    residual in the state: 8 bits with `lean`, else the 16 that complete them to float32. float16 parameters have a
    float32 master, and float32 parameters are their own.

    Args:
        learning_rate: a number, an array [] or a schedule, called with the number of earlier steps.
        betas: β1 and β2, Python numbers.
        eps: added to the root of the second moment.
        weight_decay: fraction, times the learning rate, by which a step scales down weights.
        preset: "lean", "balanced", "exact", "float32", another name in `PRESETS`, or a `Preset`.
        mask: tree of bools, or a function from parameters to one: which parameters decay. None decays all.
        maximize: ascend.
        seed: seed of stochastic rounding.
    Returns:
        A transformation whose update needs the parameters. A parameter without gradient (None) stays as it is.
    Raises:
        ValueError: betas outside [0, 1), an unknown preset, or one that JAX does not support.

    Exact: the moments of `quaver.torch.optim.AdamW`. Its weights too, except where no float32 u gives the new weight as
    p + u: a step that shrinks a bfloat16 weight by more than 2**16 (float32: by more than two) leaves it within half an
    ulp of a float32 p, and XLA on a CPU flushes weights below 2**-126.
    """
    preset, betas = preset_of(preset), _checked(betas)
    if preset.bfloat16 == "float16":
        raise ValueError(
            f"preset {preset.name} stores masters of bfloat16 weights as float16 with one scale, which JAX does not "
            "support: give bfloat16='remainder'"
        )

    def init(params: Any) -> AdamWState:
        leaves, tree = _flattened(params)
        return _state(jnp.zeros((), jnp.int32), tree, [_first_state(p, Layout.of(p, preset)) for p in leaves])

    def update(grads: Any, state: AdamWState, params: Any = None, **extra: Any) -> tuple[Any, AdamWState]:
        del extra
        if params is None:
            raise ValueError("the update of a quantized optimizer needs the parameters: update(grads, state, params)")
        leaves, tree = _flattened(params)
        trees = (state.exp_avg, state.exp_avg_scale, state.exp_avg_sq, state.exp_avg_sq_scale, state.residual)
        states = [LeafState(*each) for each in zip(*map(tree.flatten_up_to, trees), strict=True)]
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        decayed = _mask(mask, params)
        both = {
            decays: _scalars(count, rate, betas, eps, weight_decay if decays else 0.0, preset.clamp)
            for decays in set(decayed)
        }
        static = {"seed": seed if isinstance(seed, int) else None, "betas": betas, "maximize": maximize}
        words = None if isinstance(seed, int) else jnp.asarray(seed)
        updates: list[Array | None] = []
        new = []
        for i, (p, g) in enumerate(zip(leaves, tree.flatten_up_to(grads), strict=True)):
            if g is None:
                updates.append(None)
                new.append(states[i])
                continue
            layout = Layout.of(p, preset)
            run = _in_auto_axes(partial(step, layout=layout, **static), p, states[i])
            u, own = run(p, g, states[i], both[decayed[i]], jnp.uint32(i), count, words)
            updates.append(u)
            new.append(own)
        return tree.unflatten(updates), _state(count, tree, new)

    return optax.GradientTransformationExtraArgs(init, update)


#: `adamw` with 8-bit moments and residuals: 5.06 bytes per bfloat16 parameter, the parameter included.
lean = partial(adamw, preset="lean")
#: `adamw` with 8-bit moments and exact float32 weights: 6.06 bytes per bfloat16 parameter.
balanced = partial(adamw, preset="balanced")
#: `adamw` with bfloat16 moments and exact float32 weights: 8 bytes per bfloat16 parameter.
exact = partial(adamw, preset="exact")


def _flattened(params: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(params)
    return leaves, tree


def _checked(betas: Any) -> tuple[float, float]:
    b1, b2 = betas
    if not all(isinstance(b, int | float) and 0 <= b < 1 for b in (b1, b2)):
        raise ValueError(f"betas is {betas!r}; give two Python numbers from 0 to below 1")
    return float(b1), float(b2)


def _mask(mask: Any, params: Any) -> list[bool]:
    """Return for each parameter whether it decays."""
    tree = mask(params) if callable(mask) else mask
    if tree is None:
        return [True] * len(jax.tree.leaves(params))
    return [bool(each) for each in jax.tree.leaves(jax.tree.broadcast(tree, params))]


def _scalars(count: Array, rate: Any, betas: tuple[float, float], eps: Any, weight_decay: Any, clamps: bool) -> Scalars:
    """Return the scalars of a step, computed in float64 and rounded once, as in torch."""
    b1, b2 = betas

    def wide(x: Any) -> Array:
        return lax.convert_element_type(x, np.float64)

    with jax.enable_x64(True):
        t = wide(count)
        power1, power2 = wide(b1) ** t, wide(b2) ** t
        bound = wide(math.inf)
        if clamps and b1**2 < b2:
            ratio = b1**2 / b2
            grown = (1 - wide(ratio) ** t) / (1 - ratio) * (1 - power2)
            bound = (1 - b1) / (1 - b2) ** 0.5 * jnp.sqrt(grown) / (1 - power1)
        rate = wide(rate)
        scalars = (wide(eps), rate, rate * wide(weight_decay), 1 / (1 - power1), 1 / jnp.sqrt(1 - power2), bound)
        return Scalars(*(lax.convert_element_type(each, np.float32) for each in scalars))


def _in_auto_axes(function: Callable[..., Any], p: Array, state: LeafState) -> Callable[..., Any]:
    """Return a step that leaves shardings inside to the compiler, on a mesh with explicit axes."""
    mesh = jax.typeof(p).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return function
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, (p, state))
    return jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)


def _state(count: Array, tree: Any, states: list[LeafState]) -> AdamWState:
    """Return the state of all parameters."""
    columns: Any = zip(*states, strict=True) if states else [()] * len(LeafState._fields)
    m, m_scale, v, v_scale, residual = map(tree.unflatten, columns)
    return AdamWState(count, m, v, m_scale, v_scale, residual)


def _first_state(p: Any, layout: Layout) -> LeafState:
    """Return the state of a parameter before its first step."""
    moments: list[Array | None] = []
    for spec in layout.moments:
        dtype, scale_shape, scale_dtype = layout.first_moment(spec)
        moments += [_zeros(p, layout.shape, dtype)]
        moments += [None if scale_shape is None else _zeros(p, scale_shape, scale_dtype)]
    m, m_scale, v, v_scale = moments
    assert m is not None and v is not None
    if layout.weight == "master":
        return LeafState(m, m_scale, v, v_scale, jnp.asarray(p).astype(jnp.float32))
    residual = None if layout.weight_state is None else _zeros(p, layout.shape, layout.weight_state)
    return LeafState(m, m_scale, v, v_scale, residual)


def _zeros(p: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros with the sharding of a parameter, if it is known: outside `jit`, or on a mesh with explicit axes.

    A dimension that its mesh axes do not divide is replicated.
    """
    sharding = jax.typeof(p).sharding if isinstance(p, jax.core.Tracer) else getattr(p, "sharding", None)
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))] if shape else []
        for dim, axes in enumerate(spec):
            names = (axes,) if isinstance(axes, str) else axes or ()
            if shape[dim] % math.prod(sharding.mesh.shape[name] for name in names):
                spec[dim] = None
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jnp.zeros(shape, dtype, device=sharding)
