"""Tensor parallelism with and without rings on eight devices; run by test_overlap.py, which reads the JSON."""

import json
import os

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import quaver.jax as qj
from quaver import recipes

RECIPES = {
    "none": None,
    "tensorwise": recipes.tensorwise(),
    "delayed": recipes.delayed(history=4),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
}
#: Batch, tokens, features and hidden features; 4 ranks of "tp" and 2 of "dp".
B, S, D, H = 2, 256, 64, 256
NAMES = "up", "down"
SPECS = {"up": P(None, "tp"), "bias_up": P("tp"), "down": P("tp", None), "bias_down": P()}


def step(overlap: bool, recipe: Any, params: Any, state: Any, x: jax.Array, g: jax.Array) -> Any:
    """An MLP with sequence parallelism: gather tokens, column parallel, row parallel, scatter tokens."""
    tokens = qj.ShardedOperand("tp", P("dp", "tp", None), overlap=overlap)

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        up = partial(qj.linear, recipe=recipe, state=state.get("up"), name="up", gather_input=tokens)
        down = partial(qj.linear, recipe=recipe, state=state.get("down"), name="down", scatter_output=tokens)
        h = jnp.tanh(up(x, params["up"], params["bias_up"]))
        y = down(h, params["down"], params["bias_down"])
        return jax.lax.psum((y * g).sum(), ("dp", "tp"))

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(params, state, x)
    return value, gradients


def program(name: str, overlap: bool, mesh: Any) -> Any:
    specs = SPECS
    states = {layer: jax.tree.map(lambda _: P(), qj.state.init(RECIPES[name])) for layer in NAMES}
    activations = P("dp", "tp", None)
    run = partial(step, overlap, RECIPES[name])
    out = P(), (specs, states, activations)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, states, activations, activations), out_specs=out))


def arguments(name: str) -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    params = {"up": draw(D, H) / 8, "bias_up": draw(H), "down": draw(H, D) / 16, "bias_down": draw(D)}
    state = {layer: qj.state.init(RECIPES[name]) for layer in NAMES}
    return params, state, draw(B, S, D), draw(B, S, D)


def types(mesh: Any, batch: int, tokens: int, features: int, hidden: int) -> Any:
    """Shapes and shardings of the arguments in bf16, for a recipe without state."""
    shapes = {"up": (features, hidden), "bias_up": (hidden,), "down": (hidden, features), "bias_down": (features,)}
    of = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))  # noqa: E731
    x = of((batch, tokens, features), P("dp", "tp", None))
    return {name: of(shape, SPECS[name]) for name, shape in shapes.items()}, {"up": {}, "down": {}}, x, x


def reference(name: str, params: Any, state: Any, x: jax.Array, g: jax.Array) -> Any:
    """The same on one device."""

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        run = partial(qj.linear, recipe=RECIPES[name])
        h = jnp.tanh(run(x, params["up"], params["bias_up"], state=state.get("up"), name="up"))
        return (run(h, params["down"], params["bias_down"], state=state.get("down"), name="down") * g).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(params, state, x)


def difference(a: Any, b: Any) -> float:
    """Largest difference of any leaf, relative to its largest value."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-9)) for x, y in pairs)


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = {}
    # These tests spend most of their time on compiling.
    quick = {"xla_backend_optimization_level": "0"}
    for name in ("none", "delayed", "mxfp8", "nvfp4"):
        args = arguments(name)
        lowered = {overlap: program(name, overlap, mesh).lower(*args) for overlap in (False, True)}
        results = {overlap: low.compile(compiler_options=quick)(*args) for overlap, low in lowered.items()}
        found[name] = {
            "overlapped": difference(results[True], results[False]),
            "states": difference(results[True][1][1], results[False][1][1]) if jax.tree.leaves(args[1]) else 0.0,
            "one device": difference(results[False], jax.jit(partial(reference, name), compiler_options=quick)(*args)),
            "ring": lowered[True].as_text(),
            "plain": lowered[False].as_text(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
