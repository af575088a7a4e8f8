"""A model in training under JAX: the methods that the loop calls, written with JAX."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from quaver.core.converting.conversion import Report
from quaver.core.spec import Recipe
from quaver.jax.state import buffers
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.parameter_table import initial, parameters, projections
from quaver.train.configuration.sizes import MODELS
from quaver.train.learning.jax import exchange, steps
from quaver.train.learning.jax.decoder import Decoder, Params, State
from quaver.train.learning.jax.device import find
from quaver.train.learning.jax.optimizer import Moments, rates, start
from quaver.train.learning.learner import Tensors


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder with its arrays."""

    decoder: Decoder
    params: Params
    # The recipe's state, by layer: empty where the recipe keeps none.
    state: State


class JaxLearner:
    """A decoder's arrays and its AdamW."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocab: int) -> None:
        self.device = find(config.device, config.threads)
        self.config = config
        sizes = MODELS[config.model]
        self.shapes = parameters(sizes, vocab)
        self.decoder = Decoder(
            config=sizes, recipe=recipe, dtype=config.dtype, seed=config.seed, recompute=config.recompute
        )
        self._prepare(recipe)
        self.params = self._put(dict(initial(sizes, vocab, config.seed)))
        self.moments = start(self.params)
        self.updates = 0

    @property
    def said(self) -> dict[str, float]:
        return {}

    @property
    def model(self) -> Model:
        return Model(decoder=self.decoder, params=self.params, state=self.state)

    def _prepare(self, recipe: Recipe) -> None:
        """Begin with a recipe: what it remembers, by layer, and what it is applied to."""
        sizes = MODELS[self.config.model]
        layers = projections(sizes)
        self.fresh = {name: own for name in layers if (own := buffers.init(recipe))}
        skipped = {} if sizes.tied else {"head": "as the embedding, it stays in high precision"}
        self.conversion = Report(converted=dict.fromkeys(layers, recipe), skipped=skipped)
        self.state = self._put(self.fresh)

    def take(self, recipe: Recipe) -> None:
        if recipe is not self.decoder.recipe:
            self.decoder = replace(self.decoder, recipe=recipe)
            self._prepare(recipe)

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        now = rates(lr, self.updates + 1, self.config)
        loss, norm, self.params, self.moments, self.state = steps.update(
            self.decoder, self.params, self.moments, self.state, self._put(batch.astype(np.int32)), now
        )
        numbers = float(loss), float(norm)
        self.updates += all(map(math.isfinite, numbers))
        return numbers

    def loss(self, batches: np.ndarray) -> float:
        ids = self._put(batches.astype(np.int32))
        losses = [float(steps.evaluate(self.decoder, self.params, self.state, batch)) for batch in ids]
        return sum(losses) / len(losses)

    def first_output(self, batch: np.ndarray) -> str:
        for name, known in steps.finite(self.params).items():
            if not known:
                return f"the parameter {name} is already not finite"
        for micro_batch in self._put(batch.astype(np.int32)):
            for name, fine in steps.finite_outputs(self.decoder, self.params, self.state, micro_batch).items():
                if not fine:
                    return f"the first output that is not finite is that of {name}"
        return "every module's output is finite"

    def first_gradient(self, batch: np.ndarray) -> str:
        ids = self._put(batch.astype(np.int32))
        fine = steps.finite_gradients(self.decoder, self.params, self.state, ids)
        names = [name for name in self.shapes if not fine[name]]
        return f"the first gradient that is not finite is that of {names[-1]}" if names else "the norm overflowed"

    def tensors(self) -> tuple[Tensors, Tensors]:
        params, state, (first, second) = jax.device_get((self.params, self.state, self.moments))
        return {**params, **exchange.write_state(state)}, exchange.write_moments(first, second, self.updates)

    def names(self) -> set[str]:
        return set(self.tensors()[0])

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        params = exchange.weights(model, self.shapes)
        first, second, updates = exchange.read_moments(optimizer, self.shapes)
        self.state = self._put(exchange.read_state(model, self.fresh, self.decoder.recipe))
        self.params, self.updates = self._put(params), updates
        self.moments = Moments(self._put(first), self._put(second))

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self.device)
