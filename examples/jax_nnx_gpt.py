"""Train a byte-level GPT in Flax NNX in FP8 on its own source; a scan runs over its layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import quaver
import quaver.jax as qj
import quaver.jax.nnx as qn

DIM, LAYERS, TOKENS, BATCH = 64, 3, 32, 4


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> qn.TransformerLayer:
            return qn.TransformerLayer(
                DIM, 4, 128, groups=2, activation="swiglu", normalization="RMSNorm", rope=qn.Rope(), use_bias=False,
                name="layers", rngs=rngs,
            )  # fmt: skip

        self.embedding = nnx.Embed(256, DIM, rngs=rngs)
        self.layers = make(rngs)
        self.norm = qn.RMSNorm(DIM)
        self.head = nnx.Linear(DIM, 256, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: jax.Array, layer: qn.TransformerLayer) -> jax.Array:
            return layer(x)

        return self.head(self.norm(run(self.embedding(ids), self.layers)))


def loss_of(model: GPT, batch: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


@nnx.jit
def step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    # Writes each layer's next state into the model, and returns the gradients of the parameters.
    loss, gradients = qn.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
random = np.random.default_rng(0)

with qj.autocast(quaver.recipes.delayed(history=8)):  # layers are made with this recipe's state
    model = GPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
    for i in range(30):
        starts = random.integers(0, len(text) - TOKENS, BATCH)
        batch = jnp.asarray(text[starts[:, None] + np.arange(TOKENS)])
        loss = step(model, optimizer, batch)
        if i % 10 == 0 or i == 29:
            print(f"step {i:>2}  loss {loss:.3f}")

print("weight factors of the three layers' wi:", model.layers.mlp.wi.state.factor[:, 1])
