"""A model in training under PyTorch: the methods that the loop calls, written with torch."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from quaver.core.spec import Recipe
from quaver.torch.model.graph import CapturedStep
from quaver.torch.model.weights.freezing import frozen
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.sizes import MODELS
from quaver.train.learning.learner import Tensors
from quaver.train.learning.torch.decoder import build, loss_of, quantize_layers
from quaver.train.learning.torch.device import device_of
from quaver.train.learning.torch.nonfinite import first_gradient, first_module
from quaver.train.learning.torch.optimizer import adamw, load_state, state_of
from quaver.train.learning.torch.update import Update


class TorchLearner:
    """A converted `Decoder` and its AdamW."""

    def __init__(self, config: TrainConfig, recipe: Recipe, vocab: int) -> None:
        self.device = device_of(config.device)
        if config.threads or self.device.type == "cpu":
            torch.set_num_threads(config.threads or 1)
        self.config = config
        sizes = MODELS[config.model]
        self.model = build(sizes, vocab, config.seed, self.device, config.recompute)
        self.conversion = quantize_layers(self.model, recipe, config.seed)
        self.optimizer = adamw(self.model, config)
        self.update = Update(self.model, self.optimizer, config)
        self._run = self._runner()

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        self.update.set_lr(lr, self.device)
        loss, norm = self._run(self._ids(batch)).tolist()
        return loss, norm

    def loss(self, batches: np.ndarray) -> float:
        self.model.eval()
        with torch.no_grad(), frozen(self.model):
            chunk = self.config.loss_chunk
            losses = [loss_of(self.model, batch, self.config.dtype, chunk).item() for batch in self._ids(batches)]
        self.model.train()
        return sum(losses) / len(losses)

    def first_output(self, batch: np.ndarray) -> str:
        return first_module(self.model, self._ids(batch), self.config.dtype)

    def first_gradient(self, batch: np.ndarray) -> str:
        return first_gradient(self.model)

    def tensors(self) -> tuple[Tensors, Tensors]:
        return arrays(self.model.state_dict()), arrays(state_of(self.model, self.optimizer))

    def load(self, model: Tensors, optimizer: Tensors) -> None:
        try:
            self.model.load_state_dict(tensors_of(model))
            load_state(self.model, self.optimizer, tensors_of(optimizer))
            # What was recorded would go on with the tensors from before.
            self._run = self._runner()
        except RuntimeError as error:
            raise ValueError(in_short(error)) from error

    def _runner(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return CapturedStep(self.update) if self.config.capture == "step" else self.update

    def _ids(self, batch: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(batch).to(self.device)


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def in_short(error: Exception) -> str:
    """The beginning of a long error's message, in one line."""
    return " ".join(str(error).split())[:300]


def tensors_of(arrays: Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
