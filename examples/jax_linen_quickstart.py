"""FP8 in Flax linen: `autocast`, and one `value_and_grad` over the parameters and the other variables."""

import flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(ql.DenseGeneral(features=128)(x))
        x, _ = ql.LayerNormMLP(hidden=256, activation="swiglu", out=64)(x)
        return nn.Dense(10)(x)  # the head stays in high precision


model, optimizer = Classifier(), optax.adam(1e-3)
key = jax.random.key(0)
x = jax.random.normal(key, (256, 64))
labels = x[:, :10].argmax(-1)


@jax.jit
def step(params, state, moments):
    def loss_of(params, state):
        logits = model.apply({"params": params, **state}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # The gradient of the state is its next value, so the optimizer does not get it.
    loss, (gradients, state) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, state)
    updates, moments = optimizer.update(gradients, moments)
    return loss, optax.apply_updates(params, updates), state, moments


with qj.autocast(recipe=quaver.recipes.delayed(history=16)):
    variables = jax.jit(model.init)(key, x)
    state, params = flax.core.pop(variables, "params")
    print("state:", jax.tree.map(jnp.shape, state))
    moments = optimizer.init(params)
    for i in range(30):
        loss, params, state, moments = step(params, state, moments)
        if i % 10 == 0:
            print(f"step {i:>2}  loss {loss:.4f}")

layer = state["_overwrite_with_gradient"]["DenseGeneral_0"]
print("encode factors of input, weight and grad_output:", layer["factor"])
apply = jax.jit(model.apply)
high = apply({"params": params}, x)  # without a recipe: high precision
with qj.autocast(recipe="mxfp8"):  # recompiles for another recipe; mxfp8 needs no state
    error = apply({"params": params}, x) - high
print(
    f"MXFP8 differs from float32 by {jnp.linalg.norm(error) / jnp.linalg.norm(high):.4f} of its norm; loss {loss:.4f}"
)
