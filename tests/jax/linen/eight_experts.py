"""A mixture whose experts are spread over a mesh axis of eight devices, against one device; run as a program."""

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from quaver.jax import linen as ql
from tests.close import assert_close
from tests.xla_options import QUICKEST

#: Options of cases: dropless, and with dropped tokens under recipes with blocks and with a history.
CASES: tuple[dict[str, Any], ...] = ({}, {"recipe": "mxfp8", "capacity": 1.0}, {"recipe": "delayed", "capacity": 0.75})
#: Largest relative RMS difference: one activation that falls to another code is 1e-6.
MOST = 1e-5


def run(options: dict[str, Any], axis: str | None) -> Any:
    layer = ql.MoE(96, 8, 2, expert_axis=axis, **options)

    def loss(variables: Any, x: Any) -> Any:
        y = layer.apply(variables, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), y

    return layer, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=QUICKEST)


def check(options: dict[str, Any]) -> None:
    x = jax.random.normal(jax.random.key(1), (4, 16, 64))
    layer, alone = run(options, None)
    variables = layer.init(jax.random.key(0), x)
    expected = alone(variables, x)
    mesh = jax.make_mesh((4, 2), ("expert", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        spread = jax.tree.map(
            lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*(("expert",) if a.ndim > 2 else ())))),
            variables,
        )
        got = run(options, "expert")[1](spread, x)
    kernel = got[1][0]["params"]["wi"]["kernel"]
    assert kernel.sharding.spec[0] == "expert", kernel.sharding
    jax.tree.map(lambda a, b: assert_close(str(options), jax.device_get(a), jax.device_get(b), MOST), got, expected)


if __name__ == "__main__":
    for options in CASES:
        check(options)
    print(json.dumps({"cases": len(CASES)}))
