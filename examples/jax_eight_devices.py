"""FSDP and tensor parallelism on eight virtual CPU devices, with the scales and gradients of one device."""

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql

jax.config.update("jax_num_cpu_devices", 8)  # before JAX is first used

# The modules name the axes of their kernels; these rules map the names to mesh axes.
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rules = (("embed", "data"), ("mlp", "model"))  # weights sharded over data too: FSDP
layer = ql.LayerNormMLP(hidden=256, activation="swiglu", partition=True)
x = jax.random.normal(jax.random.key(1), (8, 16, 128))


def loss_of(params, state, x):
    output, _normalized = layer.apply({"params": params, **state}, x)
    return jnp.square(output).mean()


step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))

with qj.autocast(quaver.recipes.delayed(history=4)):
    boxed = jax.jit(layer.init)(jax.random.key(0), x)
    state, params = flax.core.pop(nn.unbox(boxed), "params")
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed)["params"], mesh, rules)

    one = step(params, state, x)
    sharded = jax.device_put(params, shardings)
    eight = step(sharded, state, jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))))

shard = sharded["mlp"]["wi"]["kernel"].addressable_shards[0].data
print(f"{len(jax.devices())} devices, each with {shard.shape} of wi's {params['mlp']['wi']['kernel'].shape}")
print(f"loss on one {one[0]:.7f}, on eight {eight[0]:.7f}")

(gradients, state), (others, other) = jax.device_get((one[1], eight[1]))
differences = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)), gradients, others)
print("gradients differ, relative to their norm, by at most", max(jax.tree.leaves(differences)))
same = jax.tree.map(lambda a, b: (a["factor"] == b["factor"]).all(), state, other, is_leaf=qj.state.is_state)
print("the same factors in every layer:", all(jax.tree.leaves(same)))
