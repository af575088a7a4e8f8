"""The same decoder as PyTorch's (`quaver.train.torch.decoder`), as functions over a dict of its parameters.

Parameters have PyTorch's names, shapes and layout: a matrix is [out, in]. What torch.autocast casts is cast here: the
products are bf16, the residual stream, the norms, the softmax and the loss are float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.core.spec import Recipe
from quaver.jax.activation import activate
from quaver.jax.attention import attention
from quaver.jax.linear import linear
from quaver.jax.norm import rms_norm
from quaver.jax.rope import rope
from quaver.train.sizes import ModelConfig

Params = Mapping[str, Array]
#: What a recipe keeps between steps, by the name of the layer.
State = Mapping[str, Any]
#: Called with the name and the value of everything that a part of the model puts out.
Look = Callable[[str, Array], None]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """All about a model that is not an array: hashable, a static argument of jit."""

    config: ModelConfig
    recipe: Recipe
    # Of the matrix products.
    dtype: str
    # Of stochastic rounding.
    seed: int


def ignore(name: str, x: Array) -> None:
    """Look at nothing."""


def logits_of(model: Decoder, params: Params, state: State, ids: Array, look: Look = ignore) -> Array:
    """Token ids [B, S] to logits [B, S, vocab]."""
    x = params["embedding.weight"][ids]
    look("embedding", x)
    for layer in range(model.config.layers):
        x = block(model, params, state, f"layers.{layer}", x, look)
        look(f"layers.{layer}", x)
    x = norm("norm", params, x, look)
    head = params["embedding.weight" if model.config.tied else "head.weight"]
    logits = linear(x, head.T, dtype=model.dtype)
    look("head", logits)
    return logits


def block(model: Decoder, params: Params, state: State, name: str, x: Array, look: Look) -> Array:
    """x [B, S, dim] through attention and MLP."""

    def project(part: str, x: Array) -> Array:
        full = f"{name}.{part}"
        w = params[f"{full}.weight"].T
        y = linear(x, w, recipe=model.recipe, state=state.get(full), dtype=model.dtype, name=full, seed=model.seed)
        look(full, y)
        return y

    config = model.config
    y = norm(f"{name}.attention.norm", params, x, look)
    q, k, v = (
        project(f"attention.{part}", y).reshape(*y.shape[:-1], heads, config.head_dim)  # [B, S, H, D]
        for part, heads in (("q_proj", config.heads), ("k_proj", config.groups), ("v_proj", config.groups))
    )
    q, k = rope(q, theta=config.theta), rope(k, theta=config.theta)
    y = project("attention.o_proj", attention(q, k, v, mask_type="causal").reshape(y.shape))
    look(f"{name}.attention", y)
    x = x + y
    y = norm(f"{name}.mlp.norm", params, x, look)
    y = project("mlp.down_proj", activate("swiglu", project("mlp.gate_proj", y), project("mlp.up_proj", y)))
    look(f"{name}.mlp", y)
    return x + y


def norm(name: str, params: Params, x: Array, look: Look) -> Array:
    y = rms_norm(x, params[f"{name}.weight"], eps=1e-5)
    look(name, y)
    return y


def loss_of(model: Decoder, params: Params, state: State, batch: Array, look: Look = ignore) -> Array:
    """Mean cross-entropy in nats a token, in float32, of batch [B, S + 1]."""
    logits = logits_of(model, params, state, batch[:, :-1], look).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()
