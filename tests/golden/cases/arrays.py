"""JAX: codes, `qj.linear` with its gradients, and layers of linen and NNX over two steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
from quaver import recipes
from tests.golden.inputs import values
from tests.golden.record import Record
from tests.golden.rows import rows

SHAPES = {"whole": (64, 128, 96), "ragged": (37, 80, 48)}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def cases() -> dict[str, Callable[[Record], None]]:
    found: dict[str, Callable[[Record], None]] = {f"codes of {name}": partial(codes, name) for name in recipes.RECIPES}
    for recipe, shape, dtype in rows(recipes.RECIPES, SHAPES, DTYPES):
        # One without a state of its own; layers have the others.
        text = "nvfp4(stochastic_rounding=False)" if recipe == "nvfp4" else recipe
        if recipe != "delayed":
            found[f"linear, {recipe}, {shape}, {dtype}"] = partial(linear, text, SHAPES[shape], DTYPES[dtype])
    for recipe in ("bf16", "delayed", "tensorwise", "mxfp8", "nvfp4"):
        found[f"linen, {recipe}"] = partial(linen, recipe)
        found[f"nnx, {recipe}"] = partial(of_nnx, recipe)
    return found


def codes(name: str, record: Record) -> None:
    x = values(48, 96, seed=2, hard=True)
    # XLA flushes subnormals, which torch does not.
    x[np.abs(x) < 2.0**-100] = 0
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("a", "b"):
            spec = getattr(getattr(recipes.get(name), gemm), side)
            if spec is not None:
                q = qj.quantize(jnp.asarray(x), spec, seed=3, count=5)
                record.exact(**{f"{gemm} {side}": qj.dequantize(q)})


def linear(recipe: str, shape: tuple[int, int, int], dtype: Any, record: Record) -> None:
    tokens, n_in, n_out = shape
    x, w, g = (
        jnp.asarray(values(*shape, seed=seed), dtype)
        for seed, shape in enumerate(((tokens, n_in), (n_in, n_out), (tokens, n_out)))
    )
    y, back = jax.vjp(lambda x, w: qj.linear(x, w, recipe=recipe), x, w)
    dx, dw = back(g.astype(y.dtype))
    record.sum(y=y, dx=dx, dw=dw)


def linen(recipe: str, record: Record) -> None:
    layer = ql.DenseGeneral(features=48)
    x = jnp.asarray(values(32, 64, seed=1))
    with qj.autocast(recipe):
        state, params = flax.core.pop(layer.init(jax.random.key(0), x), "params")
        params = jax.tree.map(lambda p: jnp.asarray(values(*p.shape, seed=p.ndim)), params)
        for step in range(2):
            loss, (grads, state) = jax.value_and_grad(
                lambda params, state: jnp.square(layer.apply({"params": params, **state}, x)).mean(), argnums=(0, 1)
            )(params, state)
            record.sum(**{f"loss{step}": loss})
            for path, leaf in jax.tree_util.tree_leaves_with_path((grads, state)):
                record.sum(**{f"{step} {jax.tree_util.keystr(path)}": leaf})


def of_nnx(recipe: str, record: Record) -> None:
    model = nnx.Sequential(nnx.Linear(64, 96, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(96, 48, rngs=nnx.Rngs(1)))
    qn.convert(model, recipe)
    for number, (_, p) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        p.set_value(jnp.asarray(values(*p.get_value().shape, seed=number)))
    x = jnp.asarray(values(32, 64, seed=1))
    for step in range(2):
        loss, grads = qn.value_and_grad(lambda model: jnp.square(model(x)).mean())(model)
        record.sum(**{f"loss{step}": loss})
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads)):
            record.sum(**{f"{step} {jax.tree_util.keystr(path)}": leaf})
