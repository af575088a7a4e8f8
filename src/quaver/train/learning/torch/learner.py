"""A model in training under PyTorch: the methods that the loop calls, written with torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from quaver.core.spec import Recipe
from quaver.torch.linear.stored import storing
from quaver.torch.model.programs.graph import CapturedStep
from quaver.torch.model.weights.freezing import frozen
from quaver.torch.model.weights.quantized import drop_initial_value
from quaver.torch.optim import Optimizer
from quaver.train.configuration import optimizer_name, recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.sizes import MODELS, with_capacity
from quaver.train.learning.learner import Tensors
from quaver.train.learning.torch.device import device_of
from quaver.train.learning.torch.model.balance import differing, in_bf16
from quaver.train.learning.torch.model.decoder import build, change_layers, loss_and_routings, prepare
from quaver.train.learning.torch.nonfinite import first_gradient, first_module
from quaver.train.learning.torch.optimizer import load_state, optimizer_of, renew, state_of
from quaver.train.learning.torch.parallel import shards
from quaver.train.learning.torch.parallel.group import Group
from quaver.train.learning.torch.parallel.parallelize_model import change_recipe, parallelize
from quaver.train.learning.torch.update import Update
from quaver.train.records.parts import BFLOAT16


class TorchLearner:
    """A converted `Decoder` and its optimizer; with a group, this rank's part of them.

    Batches come whole to every rank, which takes its own sequences of them; losses and norms are those of all.
    """

    def __init__(
        self, config: TrainConfig, recipe: Recipe, vocab: int, group: Group | None = None, codes: bool = True
    ) -> None:
        self.group = group
        self.device = device_of(config.device) if group is None else group.device
        if config.threads or self.device.type == "cpu":
            torch.set_num_threads(config.threads or 1)
        self.config = config
        sizes = with_capacity(MODELS[config.model], config.capacity)
        self.model = build(sizes, vocab, config.seed, self.device, config.recompute)
        self.recipe = recipe
        tp = 1 if group is None else group.sizes.tp
        codes = codes and optimizer_name.may_be_codes(len(recipe_name.parts(config.recipe)), tp)
        if group is None:
            self.conversion = prepare(self.model, recipe, config, codes)
        else:
            self.conversion = parallelize(self.model, recipe, config, group, codes)
        self.optimizer = optimizer_of(self.model, config, 0 if group is None else group.mesh.get_local_rank("pp"))
        begin(self.model, self.optimizer)
        self.update = Update(self.model, self.optimizer, config, group)
        self.said: dict[str, float] = {}
        self._run = self._runner()

    def step(self, batch: np.ndarray, lr: float) -> tuple[float, float]:
        self.update.set_lr(lr, self.device)
        loss, norm, *of_experts = self._run(self._ids(batch)).tolist()
        balance = self.update.balance
        self.said = {} if balance is None else balance.said(of_experts)
        return loss, norm

    def take(self, recipe: Recipe) -> None:
        if recipe is self.recipe:
            return
        self.recipe = recipe
        if self.group is None:
            self.conversion = change_layers(self.model, recipe, self.config.seed)
        else:
            self.conversion = change_recipe(self.model, recipe, self.config, self.group)
        # What was recorded would go on under the recipe from before.
        self._run = self._runner()

    def loss(self, batches: np.ndarray) -> float:
        self.model.eval()
        with torch.no_grad(), frozen(self.model):
            losses = self._losses(self._ids(batches))
        self.model.train()
        mean = sum(losses) / len(losses)
        if self.group is None:
            return mean
        return self.group.agreed(self.group.mean(torch.tensor(mean, dtype=torch.float64, device="cpu"))).item()

    def _losses(self, batches: torch.Tensor) -> list[float]:
        """Of each batch; and count the choices of experts that differ from bf16's, where both can be known."""
        self.said = {}
        plain = None
        if self.update.balance is not None and self.group is None and self.recipe.quantizes:
            plain = in_bf16(self.model, self.config.seed)
        if plain is None:
            return [self.update.loss(batch).item() for batch in batches]
        losses, counts = [], []
        for batch in batches:
            loss, routings = self.update.routed(batch)
            losses.append(loss.item())
            _, others = loss_and_routings(plain, batch, self.config.dtype, self.config.loss_chunk)
            counts.append(differing(routings, others))
        differ, choices = map(sum, zip(*counts, strict=True))
        self.said = {"choices_differ": differ / choices}
        return losses

    def first_output(self, batch: np.ndarray) -> str:
        # Every rank looks at all sequences, as many at a time as in training, and says the same.
        size = batch.shape[1] if self.group is None else batch.shape[1] // self.group.sizes.fsdp
        pieces = torch.from_numpy(batch).to(self.device).view(-1, size, batch.shape[-1])
        first = first_module(self.model, pieces, self.update.loss)
        return first.says if self.group is None else self.group.whose(self.update.own) + self.group.earliest(first)

    def first_gradient(self, batch: np.ndarray) -> str:
        first = first_gradient(self.model)
        return first.says if self.group is None else self.group.whose() + self.group.earliest(first, backward=True)

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

    def names(self) -> set[str]:
        own = set(self.model.state_dict())
        return own if self.group is None else own.union(*self.group.every(own))

    def write(self, folder: Path, behind: bool = False) -> Callable[[], None]:
        """Begin to write all ranks' state into a folder, each its own part."""
        assert self.group is not None
        return shards.write(self.model, self.optimizer, folder, self.group.saving if behind else None)

    def read(self, folder: Path) -> None:
        """Take up this rank's part of a checkpoint. Raises: ValueError where it does not fit."""
        try:
            shards.read(self.model, self.optimizer, folder)
        except RuntimeError as error:
            raise ValueError(in_short(error)) from error

    def renew(self) -> None:
        """See `quaver.train.learning.learner.InFewBits`."""
        renew(self.optimizer)

    def _runner(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return CapturedStep(self.update) if self.config.capture == "step" else self.update

    def _ids(self, batch: np.ndarray) -> torch.Tensor:
        if self.group is not None:
            batch = batch[:, self.group.rows(batch.shape[1])]
        return torch.from_numpy(batch).to(self.device)


def begin(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Begin what an optimizer keeps beside codes at the values that they were made of, and let these go."""
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if storing.holds_codes(p):
                    optimizer.state[p] = optimizer.first_state(p, group)
        drop_initial_value(model)


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors as numpy's, bfloat16 as `BFLOAT16`."""
    return {name: array_of(tensor.detach().cpu()) for name, tensor in tensors.items()}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def in_short(error: Exception) -> str:
    """The beginning of a long error's message, in one line."""
    return " ".join(str(error).split())[:300]


def tensors_of(arrays: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor_of(array) for name, array in arrays.items()}


def tensor_of(array: np.ndarray) -> torch.Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
