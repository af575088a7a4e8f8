"""A decoder's layers in stages, one after the other over ranks: what a rank keeps, and what runs its micro-batches.

The stages are torch's own, and so is the schedule: one forward, one backward (1F1B), of the micro-batches of a step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import quaver.torch as qt
from quaver.core.spec import Recipe
from quaver.torch.parallel import stage
from quaver.torch.parallel.traffic import during, waiting
from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.torch.decoder import Decoder, mean_loss
from quaver.train.learning.torch.parallel.group import Group


def keep_stage(model: Decoder, index: int, count: int) -> None:
    """Leave a decoder the layers of a stage, under their names; the first one has the embedding, the last the head."""
    each = len(model.layers) // count
    for number in range(len(model.layers)):
        if number // each != index:
            delattr(model.layers, str(number))
    if index > 0:
        model.register_module("embedding", None)
    if index < count - 1:
        model.register_module("norm", None)
        model.register_module("head", None)


class Part(nn.Module):
    """A stage as the pipeline calls it: what the stage before gave, or ids, to what the next one takes, or to the loss.

    Given no targets, the last stage gives a loss of 0, for its shape.

    Args:
        dtype, chunk: as `mean_loss` takes them.
    """

    def __init__(self, model: Decoder, dtype: str, chunk: int) -> None:
        super().__init__()
        self.model, self.dtype, self.chunk = model, dtype, chunk

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.model.norm is None:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
                y: Tensor = self.model(x)
            return y
        if targets is None:
            return torch.zeros(1, dtype=torch.float32, device=x.device)
        return mean_loss(self.model, x, targets, self.dtype, self.chunk).view(1)


class Pipeline:
    """The stages of a decoder; every rank of one gives the micro-batches, and gets the loss.

    Args:
        part: this rank's, wrapped by fully_shard or about to be.
        recipe: of the layers; one with histories rolls them once a step, of all micro-batches.
    """

    def __init__(self, part: Part, recipe: Recipe, config: TrainConfig, group: Group) -> None:
        self.part, self.recipe, self.config, self.group = part, recipe, config, group
        self.index, self.count = group.mesh.get_local_rank("pp"), group.sizes.pp
        self.among = group.mesh.get_group("pp")
        self.shape = (config.batch // group.sizes.fsdp, group.tokens(config), part.model.config.dim)
        if self.index:
            example = torch.empty(self.shape, dtype=torch.float32, device=group.device)
        else:
            tokens = config.sequence // group.sizes.cp
            example = torch.zeros((self.shape[0], tokens), dtype=torch.int64, device=group.device)
        self.stage = stage(part, self.index, self.count, example, device=group.device, group=self.among)
        self.schedule = Schedule1F1B(self.stage, config.accumulate, _Mean(config.accumulate), scale_grads=False)

    def step(self, batches: Tensor) -> Tensor:
        """The mean loss, float32 [], of micro-batches int64 [accumulate, B, S + 1], whose gradients are added up."""
        of_schedule: dict[str, Any] = {}
        given: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        if self.index == 0:
            given = (self.group.cut(batches[..., :-1].flatten(0, 1)),)
        if self.index == self.count - 1:
            targets = self.group.cut(batches[..., 1:].flatten(0, 1))
            of_schedule = {"targets": targets, "target": targets, "losses": losses}
        with qt.autocast(self.recipe):
            self.schedule.step(*given, **of_schedule)
        total = torch.zeros((), dtype=torch.float32, device=batches.device)
        for loss in losses:
            total += loss.detach()
        return self._of_last(total)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean loss, float32 [], of a batch int64 [B, S + 1], without gradients."""
        ranks = dist.get_process_group_ranks(self.among)
        if self.index:
            x = torch.empty((len(batch), *self.shape[1:]), dtype=torch.float32, device=batch.device)
            with waiting("activations", x):
                dist.recv(x, ranks[self.index - 1], self.among)
        else:
            x = self.group.cut(batch[:, :-1])
        last = self.index == self.count - 1
        y = self.part(x, self.group.cut(batch[:, 1:]) if last else None)
        if not last:
            with during("activations", "send", y, self.among):
                dist.send(y.contiguous(), ranks[self.index + 1], self.among)
        return self._of_last(y.squeeze() if last else torch.zeros((), dtype=torch.float32, device=batch.device))

    def _of_last(self, value: Tensor) -> Tensor:
        """The last stage's number, on all of them."""
        gives = self.index == self.count - 1
        with during("control", "send", value, self.among) if gives else waiting("control", value):
            dist.broadcast(value, dist.get_process_group_ranks(self.among)[-1], self.among)
        return value


class _Mean:
    """What the schedule takes for a loss of a micro-batch: its part of the mean."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self, loss: Tensor, targets: Tensor) -> Tensor:
        return loss.squeeze() / self.batches
