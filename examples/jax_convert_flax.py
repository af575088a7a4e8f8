"""Quantize existing Flax models: by one argument of linen's modules, by `convert` in NNX."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import quaver
import quaver.jax.linen as ql
import quaver.jax.nnx as qn

key = jax.random.key(0)
x = jax.random.normal(key, (64, 8, 64))
target = jnp.roll(x, 1, axis=1)

# Flax linen: modules take a `dot_general_cls`. TrainState replaces the state by its gradient.
op = ql.dot_general_cls(quaver.recipes.delayed(history=16))
model = nn.Sequential([nn.Dense(128, dot_general_cls=op), nn.gelu, nn.Dense(64, dot_general_cls=op)])
train = TrainState.create(apply_fn=model.apply, params=jax.jit(model.init)(key, x), tx=optax.adam(3e-3))


@jax.jit
def linen_step(train):
    loss, gradients = jax.value_and_grad(lambda v: jnp.square(train.apply_fn(v, x) - target).mean())(train.params)
    return loss, train.apply_gradients(grads=gradients)


for i in range(10):
    loss, train = linen_step(train)
    if i % 3 == 0:
        print(f"linen step {i}  loss {loss:.4f}")


# Flax NNX: convert in place, by rules.
class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


block = Block(nnx.Rngs(0))
rules = quaver.Rules({"head": None, "attention.*": "tensorwise", "*": quaver.recipes.delayed(history=16)})
print(qn.convert(block, rules, skip=["attention.out"]))
optimizer = nnx.Optimizer(block, optax.adam(3e-3), wrt=nnx.Param)


@nnx.jit
def nnx_step(block: Block, optimizer: nnx.Optimizer) -> jax.Array:
    loss, gradients = qn.value_and_grad(lambda block: jnp.square(block(x) - target).mean())(block)
    optimizer.update(block, gradients)
    return loss


for i in range(10):
    loss = nnx_step(block, optimizer)
    if i % 3 == 0:
        print(f"NNX step {i}  loss {loss:.4f}")
print("reverted:", qn.revert(block))
