"""The learner interface of the training loop under JAX: the decoder, AdamW, compiled steps, and checkpoints.

The decoder is that of `quaver.train.torch.decoder` as functions of a dict of parameters. Parameters have PyTorch's
names, shapes and layout: a matrix is [out, in]. Dtypes follow torch.autocast: GEMMs are in bf16; the residual stream,
norms, softmax and loss are in float32.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from quaver.jax.blocks.attention import attention, rope
from quaver.jax.blocks.layers import activate, normalize
from quaver.jax.inspection.inspector import Inspector, inspect
from quaver.jax.linears.function import linear
from quaver.jax.state import buffers
from quaver.recipes.conversion import ConversionReport
from quaver.recipes.spec import Recipe
from quaver.recipes.text import shown
from quaver.reference import operations
from quaver.train.config import TrainConfig
from quaver.train.learner import Tensors
from quaver.train.memory import initial_values, parameters, projections
from quaver.train.model_config import MODELS, ModelConfig

# ---- device ----


def find_device(name: str, threads: int = 0) -> jax.Device:
    """Return the JAX device of a name: cpu, cuda, cuda:1; auto is JAX's default.

    Args:
        name: name of the device.
        threads: CPU threads, 0 for one; has no effect if the process has used JAX before.
    Raises: ValueError if this machine has no such device.
    """
    # XLA reads the size of its CPU thread pool once, when JAX first looks for devices.
    os.environ.setdefault("NPROC", str(threads or 1))
    if name == "auto":
        return jax.devices()[0]
    platform, colon, number = name.partition(":")
    try:
        if colon and not (number.isascii() and number.isdigit()):
            raise ValueError(f"{number!r} is not a number")
        return jax.devices(platform)[int(number or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        known = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
        raise ValueError(
            f"the device {shown(name)} is not available to JAX, which has {known}; try --device cpu"
        ) from error


# ---- decoder ----

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
        options: Any = {"window": config.window(self.number), "scale": config.scale, "soft_cap": config.soft_cap}
        y = attention(q, k, v, mask_type="causal", recipe=self.model.recipe, **options)
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


# ---- optimizer ----
# AdamW with the numbers of torch.optim, weight decay on matrices only, and gradient clipping by norm.

#: torch's default epsilon, and the epsilon that torch adds to the norm when clipping.
EPS, CLIP_EPS = 1e-8, 1e-6


class Rates(NamedTuple):
    """Scalars of one update, computed in float64 like torch."""

    # Learning rate divided by the first moment's bias correction.
    step: float
    # Factor of a matrix from weight decay: 1 - learning rate × weight decay.
    keep: float
    # Square root of the second moment's bias correction.
    root: float
    # Weight of the new gradient in the moments: 1 - beta.
    first: float
    second: float
    # Maximum norm of the gradient; infinite for no clipping.
    clip: float


def rates(lr: float, update: int, config: TrainConfig) -> Rates:
    """Return the scalars of an update, counted from 1."""
    return Rates(
        step=lr / (1 - config.beta1**update),
        keep=1 - lr * config.weight_decay,
        root=math.sqrt(1 - config.beta2**update),
        first=1 - config.beta1,
        second=1 - config.beta2,
        clip=config.clip or math.inf,
    )


class Moments(NamedTuple):
    """Moving averages of the gradient and its square."""

    first: Params
    second: Params


def zero_moments(params: Params) -> Moments:
    """Return zero moments."""
    return Moments(*({name: jnp.zeros_like(p) for name, p in params.items()} for _ in range(2)))


def norm_of(grads: Params) -> Array:
    """Return the total norm of all gradients."""
    return jnp.sqrt(jnp.stack([jnp.square(g).sum() for g in grads.values()]).sum())


def adamw(
    params: Params, moments: Moments, grads: Params, norm: Array, rates: Rates
) -> tuple[dict[str, Array], Moments]:
    """Apply one AdamW update with clipped gradients; returns new parameters and moments.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, in the order of torch.optim.AdamW's operations.
    """
    factor = jnp.minimum(rates.clip / (norm + CLIP_EPS), 1.0)
    new: dict[str, Array] = {}
    first: dict[str, Array] = {}
    second: dict[str, Array] = {}
    for name, p in params.items():
        g = grads[name] * factor
        first[name] = m = moments.first[name] + rates.first * (g - moments.first[name])
        second[name] = v = moments.second[name] + rates.second * (jnp.square(g) - moments.second[name])
        decayed = p * rates.keep if p.ndim >= 2 else p
        new[name] = decayed - rates.step * m / (jnp.sqrt(v) / rates.root + EPS)
    return new, Moments(first, second)


# ---- checkpoints ----
# Conversion between JAX arrays and PyTorch's checkpoint format: names, shapes, layout and recipe state.
#
# A layer's `history` and `factor` (delayed scaling) are float32 in both. PyTorch rolls a history at the start of the
# next step and JAX at the end of backward, so histories are rolled on loading; rolling twice changes nothing. `count`
# (stochastic rounding) is int64 [3] in a checkpoint, with -1 last for layers that draw noise by name, and float32 [2]
# in JAX.

#: Recipe state of a layer, as the last part of a tensor's name.
STATE = ("history", "factor", "count")


def read_weights(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the parameters. Raises: ValueError unless names and shapes are those of the model."""
    parameters = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in STATE}
    for name in [*shapes, *parameters]:
        expected, actual = shapes.get(name), parameters[name].shape if name in parameters else None
        if expected != actual:
            raise ValueError(f"{name} has shape {actual} in the checkpoint and {expected} in the model")
    return {name: parameters[name].astype(np.float32) for name in shapes}


def write_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return every layer's state by its full name."""
    arrays = {f"{layer}.{key}": np.asarray(value) for layer, own in state.items() for key, value in own.items()}
    return {name: np.array([*a, -1], np.int64) if name.endswith(".count") else a for name, a in arrays.items()}


def read_state(
    tensors: Tensors, fresh: Mapping[str, Mapping[str, Any]], recipe: Recipe
) -> dict[str, dict[str, np.ndarray]]:
    """Return every layer's state; missing entries, or those of another length, start fresh with a single warning.

    Args:
        tensors: the checkpoint's tensors.
        fresh: the state of a new model, by layer.
        recipe: recipe of the layers.
    """
    state = {layer: {key: np.asarray(value) for key, value in own.items()} for layer, own in fresh.items()}
    missing: list[str] = []
    for layer, own in state.items():
        own_tensors = {key: tensors.get(f"{layer}.{key}") for key in own}
        saved_history, count = own_tensors.get("history"), own_tensors.get("count")
        if "count" in own:
            if count is None:
                missing.append(f"{layer}.count")
            else:
                own["count"] = count[:2].astype(np.float32)
        if "history" in own:
            if saved_history is None or own_tensors["factor"] is None or saved_history.shape != own["history"].shape:
                missing.append(f"{layer}.history")
            else:
                own["history"], own["factor"] = roll_history(saved_history, own_tensors["factor"], recipe)
    if missing:
        warnings.warn(
            f"{missing[0]} is not in the checkpoint, or of another length (another recipe wrote it): it starts fresh, "
            "as do missing entries of other layers",
            stacklevel=2,
        )
    return state


def roll_history(window: np.ndarray, factor: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Roll history [length, 3] and factor [3] with the amaxes that the last step recorded in row 0."""
    assert recipe.delayed is not None
    after = [
        operations.roll(window[:, i], factor[i], recipe.delayed, spec.format, spec.power_of_two)
        for i, spec in enumerate(recipe.history_specs)
    ]
    return np.stack([own for own, _ in after], axis=1), np.array([e for _, e in after], np.float32)


def write_moments(first: Tensors, second: Tensors, updates: int) -> dict[str, np.ndarray]:
    """Return the optimizer's state in torch.optim.AdamW's form; empty before the first update."""
    if updates == 0:
        return {}
    moments = {"exp_avg": first, "exp_avg_sq": second}
    arrays = {f"{name}/{key}": np.asarray(value) for key, own in moments.items() for name, value in own.items()}
    return arrays | {f"{name}/step": np.array(updates, np.float32) for name in first}


def read_moments(
    tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Return both moments and the number of updates. Raises: ValueError unless they fit the model."""
    if not tensors:
        nothing = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return nothing, dict(nothing), 0
    steps = {int(value) for value in _read_moment(tensors, "step", dict.fromkeys(shapes, ())).values()}
    if len(steps) != 1:
        raise ValueError(f"the parameters were updated {sorted(steps)} times, not equally often")
    return _read_moment(tensors, "exp_avg", shapes), _read_moment(tensors, "exp_avg_sq", shapes), steps.pop()


def _read_moment(tensors: Tensors, key: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    slots = {name.rpartition("/")[0]: tensor for name, tensor in tensors.items() if name.endswith(f"/{key}")}
    return read_weights(slots, shapes)


# ---- steps ----
# Compiled functions: one update, one loss, and the search for NaN after a failure.


def gradients(model: Decoder, params: Params, state: State, batch: Array) -> tuple[Array, Params, State]:
    """Return mean loss and gradient over micro-batches [accumulate, B, S + 1], and the recipe state after them.

    The gradient with respect to the recipe state is its next value; each micro-batch starts from that of the previous
    one.
    """
    differentiate = jax.value_and_grad(partial(loss_of, model), argnums=(0, 1))
    if len(batch) == 1:
        loss, (grads, state) = differentiate(params, state, batch[0])
        return loss, grads, state

    def add(carry: tuple[Array, Params, State], micro_batch: Array) -> tuple[tuple[Array, Params, State], None]:
        total, sums, state = carry
        loss, (grads, state) = differentiate(params, state, micro_batch)
        return (total + loss, jax.tree.map(jnp.add, sums, grads), state), None

    nothing = jnp.float32(0), jax.tree.map(jnp.zeros_like, params), state
    (total, sums, state), _ = lax.scan(add, nothing, batch)
    return total / len(batch), jax.tree.map(lambda g: g / len(batch), sums), state


@partial(jax.jit, static_argnames="model", donate_argnames=("params", "moments", "state"))
def update(
    model: Decoder, params: Params, moments: Moments, state: State, batch: Array, rates: Rates
) -> tuple[Array, Array, Params, Moments, State]:
    """Run one step: returns loss, gradient norm and new arrays; the old arrays if either number is not finite."""
    loss, grads, next_state = gradients(model, params, state, batch)
    norm = norm_of(grads)
    after = *adamw(params, moments, grads, norm, rates), next_state
    fine = jnp.isfinite(loss) & jnp.isfinite(norm)
    new_state = jax.tree.map(lambda new, old: lax.select(fine, new, old), after, (params, moments, state))
    return loss, norm, *new_state


#: Loss of one batch, without recording state.
evaluate = jax.jit(loss_of, static_argnums=0, static_argnames="look")


@partial(jax.jit, static_argnames="model")
def finite_gradients(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, Array]:
    """Return True for each parameter whose gradient is finite."""
    return finite_parameters(gradients(model, params, state, batch)[1])


def finite_outputs(model: Decoder, params: Params, state: State, batch: Array) -> dict[str, bool]:
    """Return True for each module whose output is finite, in order of computation."""
    names: list[str] = []

    @jax.jit
    def look(params: Params, state: State, batch: Array) -> list[Array]:
        flags: list[Array] = []

        def note(name: str, x: Array) -> None:
            names.append(name)
            flags.append(jnp.isfinite(x).all())

        loss_of(model, params, state, batch, note)
        return flags

    flags = look(params, state, batch)
    return {name: bool(flag) for name, flag in zip(names, flags, strict=True)}


def finite_parameters(params: Params) -> dict[str, Array]:
    return {name: jnp.isfinite(p).all() for name, p in params.items()}


# ---- learner ----


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder with its arrays."""

    decoder: Decoder
    params: Params
    # Recipe state by layer; empty if the recipe has none.
    state: State


class JaxLearner:
    """Learner with the arrays of a decoder and of AdamW."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocab: int) -> None:
        self.device = find_device(config.device, config.threads)
        self.config = config
        sizes = MODELS[config.model]
        self.shapes = parameters(sizes, vocab)
        self.decoder = Decoder(
            config=sizes, recipe=recipe, dtype=config.dtype, seed=config.seed, recompute=config.recompute
        )
        self._prepare(recipe)
        self.params = self._put(dict(initial_values(sizes, vocab, config.seed, config.nudge)))
        self.moments = zero_moments(self.params)
        self.updates = 0
        self.extra_metrics: dict[str, float] = {}
        self.inspector: Inspector | None = None

    def inspect(self, folder: Path, first: int) -> AbstractContextManager[object]:
        every = self.config.inspect_every
        self.inspector = inspect(every=every, start=every, out=folder, resume=first)
        return self.inspector

    def _unmeasured(self) -> AbstractContextManager[None]:
        """Return a context whose layers do not count as a part of a measured step."""
        return nullcontext() if self.inspector is None else self.inspector.pause()

    @property
    def model(self) -> DecoderModel:
        return DecoderModel(decoder=self.decoder, params=self.params, state=self.state)

    def _prepare(self, recipe: Recipe) -> None:
        """Initialize state and report for a recipe."""
        sizes = MODELS[self.config.model]
        layers = projections(sizes)
        self.fresh = {name: own for name in layers if (own := buffers.init(recipe))}
        skipped = {} if sizes.tied else {"head": "as the embedding, it stays in high precision"}
        self.conversion = ConversionReport(converted=dict.fromkeys(layers, recipe), skipped=skipped)
        self.state = self._put(self.fresh)

    def change_recipe(self, recipe: Recipe) -> None:
        if recipe is not self.decoder.recipe:
            self.decoder = replace(self.decoder, recipe=recipe)
            self._prepare(recipe)

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        now = rates(lr, self.updates + 1, self.config)
        with nullcontext() if self.decoder.recipe.quantizes else self._unmeasured():
            loss, norm, self.params, self.moments, self.state = update(
                self.decoder, self.params, self.moments, self.state, self._put(batch.astype(np.int32)), now
            )
        numbers = float(loss), float(norm)
        if self.inspector is not None:
            self.inspector.step()
            self.extra_metrics = {f"inspect_{name}": value for name, value in self.inspector.summary().items()}
            self.inspector.rows.clear()  # the file has them
        self.updates += all(map(math.isfinite, numbers))
        return numbers

    def loss(self, batches: np.ndarray) -> float:
        ids = self._put(batches.astype(np.int32))
        with self._unmeasured():
            losses = [float(evaluate(self.decoder, self.params, self.state, batch)) for batch in ids]
        return sum(losses) / len(losses)

    def first_output(self, batch: np.ndarray) -> str:
        for name, known in finite_parameters(self.params).items():
            if not known:
                return f"the parameter {name} is already not finite"
        for micro_batch in self._put(batch.astype(np.int32)):
            with self._unmeasured():
                outputs = finite_outputs(self.decoder, self.params, self.state, micro_batch)
            for name, fine in outputs.items():
                if not fine:
                    return f"the first output that is not finite is that of {name}"
        return "every module's output is finite"

    def first_gradient(self, batch: np.ndarray) -> str:
        ids = self._put(batch.astype(np.int32))
        with self._unmeasured():
            fine = finite_gradients(self.decoder, self.params, self.state, ids)
        names = [name for name in self.shapes if not fine[name]]
        return f"the first gradient that is not finite is that of {names[-1]}" if names else "the norm overflowed"

    def tensors(self) -> tuple[Tensors, Tensors]:
        params, state, (first, second) = jax.device_get((self.params, self.state, self.moments))
        return {**params, **write_state(state)}, write_moments(first, second, self.updates)

    def names(self) -> set[str]:
        return set(self.tensors()[0])

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        params = read_weights(model, self.shapes)
        first, second, updates = read_moments(optimizer, self.shapes)
        self.state = self._put(read_state(model, self.fresh, self.decoder.recipe))
        self.params, self.updates = self._put(params), updates
        self.moments = Moments(self._put(first), self._put(second))

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self.device)
