"""The decoder of `quaver.train.torch.decoder` as functions of a dict of parameters.

Parameters have PyTorch's names, shapes and layout: a matrix is [out, in]. Dtypes follow torch.autocast: GEMMs are in
bf16; the residual stream, norms, softmax and loss are in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from quaver.jax.blocks.attention import attention, rope
from quaver.jax.blocks.layers import activate, normalize
from quaver.jax.linears.function import linear
from quaver.recipes.spec import Recipe
from quaver.train.model_config import ModelConfig

Params = Mapping[str, Array]
#: Recipe state by layer name.
State = Mapping[str, Any]
#: Called with the name and value of every module output.
Look = Callable[[str, Array], None]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Static part of a model, hashable as a static argument of jit."""

    config: ModelConfig
    recipe: Recipe
    # Dtype of the GEMMs.
    dtype: str
    # Seed of stochastic rounding.
    seed: int
    # Recomputation in backward: "none", "mlp" or "full" (whole layers).
    recompute: str = "none"


def ignore(name: str, x: Array) -> None:
    """Default `Look` that does nothing."""


def logits_of(model: Decoder, params: Params, state: State, ids: Array, look: Look = ignore) -> Array:
    """Compute logits [B, S, vocab] from token ids [B, S]."""
    config = model.config
    x = params["embedding.weight"][ids]
    look("embedding", x)
    if config.scaled_embedding:
        x = x * jnp.float32(config.dim**0.5)
    for number in range(config.layers):
        layer = DecoderLayer(model, params, state, number, look)
        x = layer.again("full", layer)(x)
        look(layer.name, x)
    x = norm("norm", config, params, x, look)
    head = params["embedding.weight" if config.tied else "head.weight"]
    logits = linear(x, head.T, dtype=model.dtype)
    look("head", logits)
    return capped(logits, config.logit_cap)


def capped(logits: Array, cap: float | None) -> Array:
    """Apply the soft cap cap * tanh(logits / cap) in float32."""
    return logits if cap is None else cap * jnp.tanh(logits.astype(jnp.float32) / cap)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """A layer with its arrays, called with x [B, S, dim]."""

    model: Decoder
    params: Params
    state: State
    number: int
    look: Look

    @property
    def name(self) -> str:
        return f"layers.{self.number}"

    def __call__(self, x: Array) -> Array:
        mlp = self.again("mlp", self.mlp)
        if self.model.config.parallel:
            shared = self.norm("norm", x) if self.model.config.parallel is True else None
            return x + (self.attention(x, shared) + mlp(x, shared))
        x = x + self.norm("attention_post_norm", self.attention(x))
        return x + self.norm("mlp_post_norm", mlp(x))

    def again(self, what: str, part: Callable[..., Array]) -> Callable[..., Array]:
        """Wrap a block in jax.checkpoint if the model's `recompute` names it."""
        chosen = self.model.recompute == what and self.look is ignore
        return jax.checkpoint(part) if chosen else part

    def attention(self, x: Array, normalized: Array | None = None) -> Array:
        config = self.model.config
        y = self.norm("attention.norm", x) if normalized is None else normalized
        heads = {"q_proj": config.heads, "k_proj": config.groups, "v_proj": config.groups}
        q, k, v = (
            self.project(f"attention.{part}", y).reshape(*y.shape[:-1], count, config.head_dim)  # [B, S, H, D]
            for part, count in heads.items()
        )
        q, k = self.norm("attention.q_norm", q, config.qk_norm), self.norm("attention.k_norm", k, config.qk_norm)
        q, k = (rope(x, theta=config.theta, fraction=config.fraction) for x in (q, k))
        window, scale, cap = config.window(self.number), config.scale, config.soft_cap
        y = attention(q, k, v, mask_type="causal", window=window, scale=scale, soft_cap=cap)
        self.look(f"{self.name}.attention.core", y)
        y = self.project("attention.o_proj", y.reshape(*x.shape[:-1], -1))
        self.look(f"{self.name}.attention", y)
        return y

    def mlp(self, x: Array, normalized: Array | None = None) -> Array:
        config = self.model.config
        y = self.norm("mlp.norm", x) if normalized is None else normalized
        wide = [self.project(f"mlp.{part}", y) for part in ("gate_proj", "up_proj")[not config.gated :]]
        y = self.project("mlp.down_proj", activate(config.activation, *wide))
        self.look(f"{self.name}.mlp", y)
        return y

    def project(self, part: str, x: Array) -> Array:
        model, full = self.model, f"{self.name}.{part}"
        w, bias = self.params[f"{full}.weight"].T, self.params.get(f"{full}.bias")
        state = self.state.get(full)
        y = linear(x, w, bias, recipe=model.recipe, state=state, dtype=model.dtype, name=full, seed=model.seed)
        self.look(full, y)
        return y

    def norm(self, part: str, x: Array, kind: str | None = None) -> Array:
        """Apply the norm of this name; returns x unchanged if the model has none."""
        full = f"{self.name}.{part}"
        return norm(full, self.model.config, self.params, x, self.look, kind) if f"{full}.weight" in self.params else x


def norm(name: str, config: ModelConfig, params: Params, x: Array, look: Look, kind: str | None = None) -> Array:
    weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
    kind = kind or config.normalization
    y = normalize(x, weight, bias, normalization=kind, eps=config.eps, zero_centered=config.zero_centered)
    look(name, y)
    return y


def loss_of(model: Decoder, params: Params, state: State, batch: Array, look: Look = ignore) -> Array:
    """Return the mean cross-entropy in nats per token, in float32, of a batch [B, S + 1]."""
    logits = logits_of(model, params, state, batch[:, :-1], look).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()
