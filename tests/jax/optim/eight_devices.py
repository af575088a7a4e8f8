"""Steps of `quaver.jax.optim` on eight devices against one; run as a program."""

import os
import re
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from quaver.jax import optim
from tests.xla_options import QUICKEST

P = PartitionSpec
#: Parameters by shape and sharding; blocks of 64 end at the ends of shards.
WHOLE = {"rows": ((64, 128), P("data")), "columns": ((32, 512), P(None, ("data", "model"))), "vector": ((64,), P())}
#: Blocks that several shards share; rows that no axis divides by four; a convolution, whose columns are three axes.
CUT = {"inside": ((64, 96), P("model", "data")), "ragged": ((64, 130), P(None, "model"))}
CUT |= {"conv": ((64, 32, 3, 3), P("model", "data"))}

tx = optim.lean(2.0**-7)


def drawn(shapes: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for name, (shape, _) in shapes.items()}


def step(params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: (*x.sharding.spec, *[None] * x.ndim)[: x.ndim], tree)


def check(shapes: Any, kind: AxisType, gathers: bool) -> None:
    expected, state = drawn(shapes, 0), tx.init(drawn(shapes, 0))
    alone = jax.jit(step, compiler_options=QUICKEST)
    for seed in (1, 2):
        expected, state = alone(expected, state, drawn(shapes, seed))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)

    def put(tree: Any) -> Any:
        return {name: jax.device_put(x, NamedSharding(mesh, shapes[name][1])) for name, x in tree.items()}

    with jax.set_mesh(mesh):
        got = put(drawn(shapes, 0))
        first = own = tx.init(got)
        assert specs(own.exp_avg) == specs(own.residual) == specs(got)
        donating = jax.jit(step, donate_argnums=(0, 1), compiler_options=QUICKEST)
        run = donating.lower(got, own, put(drawn(shapes, 1))).compile()
        collectives = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", run.as_text())
        assert gathers or not collectives, collectives
        before = specs((got, first))
        for seed in (1, 2):
            got, own = run(got, own, put(drawn(shapes, seed)))
        assert specs((got, own)) == before
    jax.tree.map(np.testing.assert_array_equal, (got, own), (expected, state))


if __name__ == "__main__":
    check(WHOLE, AxisType.Auto, gathers=False)
    check(WHOLE | CUT, AxisType.Auto, gathers=True)
    check(WHOLE, AxisType.Explicit, gathers=False)
