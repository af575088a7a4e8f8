"""A decoder's layers in stages, one after the other over ranks: what a rank keeps, and what runs its micro-batches.

The stages are torch's own, and so are the schedules.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import quaver.torch as qt
from quaver.core.spec import Recipe
from quaver.torch.parallel import stage
from quaver.torch.parallel.traffic import during, waiting
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.pipelines import holders, stages_each
from quaver.train.learning.torch.model.decoder import Decoder, mean_loss
from quaver.train.learning.torch.parallel.group import Group


def keep_stages(model: Decoder, stages: Sequence[int], count: int) -> None:
    """Leave a decoder the layers of its rank's stages, under their names; the first stage has the embedding, the last
    the head."""
    for number in range(len(model.layers)):
        if stage_of(f"layers.{number}", model.config.layers, count) not in stages:
            delattr(model.layers, str(number))
    if 0 not in stages:
        model.register_module("embedding", None)
    if count - 1 not in stages:
        model.register_module("norm", None)
        model.register_module("head", None)


def stage_of(name: str, layers: int, count: int) -> int:
    """The stage of a module or parameter of a decoder of so many layers in `count` stages."""
    first, *rest = name.split(".")
    if first == "layers":
        return int(rest[0]) * count // layers
    return 0 if first == "embedding" else count - 1


class Part(nn.Module):
    """A stage as the pipeline calls it: what the stage before gave, or ids, to what the next one takes, or to the loss.

    Given no targets, the last stage gives a loss of 0, for its shape.

    Args:
        model: the rank's decoder; the part has those of its modules that are the stage's.
        index, count: which stage it is, of how many.
        dtype, chunk: as `mean_loss` takes them.
    """

    def __init__(self, model: Decoder, index: int, count: int, dtype: str, chunk: int) -> None:
        super().__init__()
        own, layers = copy.copy(model), model.config.layers
        own._modules = {
            name: nn.ModuleList() if name == "layers" else module if stage_of(name, layers, count) == index else None
            for name, module in model._modules.items()
        }
        for name, layer in model.layers.named_children():
            if stage_of(f"layers.{name}", layers, count) == index:
                own.layers.add_module(name, layer)
        self.model, self.index, self.dtype, self.chunk = own, index, dtype, chunk

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

    A rank's stages take turns by the schedule of the options. Those that cut a backward in two find it cut: `stage`.

    Attributes:
        parts: this rank's stages, each to be wrapped by fully_shard.

    Args:
        model: of which this rank keeps its stages' layers.
        recipe: of the layers; one with histories rolls them once a step, of all micro-batches.
    """

    def __init__(self, model: Decoder, recipe: Recipe, config: TrainConfig, group: Group) -> None:
        self.recipe, self.config, self.group = recipe, config, group
        self.layers, self.rank = model.config.layers, group.mesh.get_local_rank("pp")
        each = stages_each(config.pp_schedule, config.pp_stages)
        #: The rank of each stage.
        self.holders = holders(config.pp_schedule, group.sizes.pp, each)
        count = len(self.holders)
        own = [index for index, rank in enumerate(self.holders) if rank == self.rank]
        keep_stages(model, own, count)
        chunk = group.loss_chunk(config)
        self.parts = [Part(model, index, count, config.dtype, chunk) for index in own]
        self.among = group.mesh.get_group("pp")
        self.shape = (config.batch // group.sizes.fsdp, group.tokens(config), model.config.dim)
        stages = [stage(part, part.index, count, self._example(part), group=self.among) for part in self.parts]
        kind = get_schedule_class(config.pp_schedule)
        of_rank: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self.schedule = kind(of_rank, config.accumulate, _Mean(config.accumulate), scale_grads=False)

    def _example(self, part: Part) -> Tensor:
        device = self.group.device
        if part.index:
            return torch.empty(self.shape, dtype=torch.float32, device=device)
        tokens = self.config.sequence // self.group.sizes.cp
        return torch.zeros((self.shape[0], tokens), dtype=torch.int64, device=device)

    def stage_of(self, name: str) -> int:
        """The stage of a module or parameter of the whole decoder."""
        return stage_of(name, self.layers, len(self.holders))

    def step(self, batches: Tensor) -> Tensor:
        """The mean loss, float32 [], of micro-batches int64 [accumulate, B, S + 1], whose gradients are added up."""
        of_schedule: dict[str, Any] = {}
        given: tuple[Tensor, ...] = ()
        losses: list[Tensor] = []
        if self.rank == self.holders[0]:
            given = (self.group.cut(batches[..., :-1].flatten(0, 1)),)
        if self.rank == self.holders[-1]:
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
        x, last = self.group.cut(batch[:, :-1]), len(self.holders) - 1
        parts = iter(self.parts)
        for index, rank in enumerate(self.holders):
            if rank != self.rank:
                continue
            if index and self.holders[index - 1] != rank:
                x = torch.empty((len(batch), *self.shape[1:]), dtype=torch.float32, device=batch.device)
                with waiting("activations", x):
                    dist.recv(x, ranks[self.holders[index - 1]], self.among)
            x = next(parts)(x, self.group.cut(batch[:, 1:]) if index == last else None)
            if index < last and self.holders[index + 1] != rank:
                with during("activations", "send", x, self.among):
                    dist.send(x.contiguous(), ranks[self.holders[index + 1]], self.among)
        has_last = self.holders[-1] == self.rank
        return self._of_last(x.squeeze() if has_last else torch.zeros((), dtype=torch.float32, device=batch.device))

    def _of_last(self, value: Tensor) -> Tensor:
        """The last stage's number, on all of them."""
        gives = self.holders[-1] == self.rank
        with during("control", "send", value, self.among) if gives else waiting("control", value):
            dist.broadcast(value, dist.get_process_group_ranks(self.among)[self.holders[-1]], self.among)
        return value


class _Mean:
    """What the schedule takes for a loss of a micro-batch: its part of the mean."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self, loss: Tensor, targets: Tensor) -> Tensor:
        return loss.squeeze() / self.batches
