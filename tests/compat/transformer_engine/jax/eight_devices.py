"""A layer that `MeshResource` shards over eight devices, beside the same on one. Run by test_sharding.py."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from quaver.compat.transformer_engine import jax as te
from quaver.compat.transformer_engine.common.recipe import MXFP8BlockScaling
from quaver.compat.transformer_engine.jax.sharding import global_mesh_resource

LAYER = te.flax.TransformerLayer(
    64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, enable_relative_embedding=False, use_bias=True,
    enable_sequence_parallel=True,
)  # fmt: skip
X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16, 64)), jnp.float32)


def step(variables: object, x: jax.Array) -> object:
    return jax.value_and_grad(lambda v: jnp.square(LAYER.apply(v, x, deterministic=True)).mean())(variables)


def main() -> None:
    boxed = LAYER.init(jax.random.key(0, impl="unsafe_rbg"), X, deterministic=True)
    variables = nn.unbox(boxed)
    with te.autocast(True, MXFP8BlockScaling()):
        expected = jax.jit(step)(variables, X)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    resource = te.MeshResource(fsdp_resource="data", tpsp_resource="model")
    with jax.set_mesh(mesh), te.autocast(True, MXFP8BlockScaling(), resource):
        assert global_mesh_resource() is resource
        rules = te.flax.extend_logical_axis_rules((("mine", None),))
        assert dict(rules)["nvte_w_tp"] == "model" and rules[0] == ("mine", None)
        specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)
        assert specs["params"]["mlp"]["wi_kernel"] == PartitionSpec("data", None, "model"), specs
        assert specs["params"]["attention"]["out"]["kernel"] == PartitionSpec("model", "data")
        sharded = jax.device_put(variables, nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules))
        program = jax.jit(step).lower(sharded, X).compile()
        got = program(sharded, X)
        # The sequence is gathered before the GEMMs, and a sum over "model" leaves them.
        assert "all-gather" in program.as_text()
    assert global_mesh_resource() is None
    for one, eight in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(eight, one, rtol=0, atol=1e-5 * max(float(jnp.abs(one).max()), 1e-6))
    with jax.set_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(tp_resource="modle")):
        try:
            jax.eval_shape(partial(step, variables), X)
        except ValueError as error:
            assert "MeshResource names axes {'tp_resource': 'modle'}, and the mesh has ('data', 'model')" in str(error)
        else:
            raise AssertionError("a mesh without this axis was accepted")
    print("as one device")


if __name__ == "__main__":
    main()
