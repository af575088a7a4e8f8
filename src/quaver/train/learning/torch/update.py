"""One update of a model, as operations on its device alone: it can be recorded as a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.torch.optim import Optimizer
from quaver.torch.parallel import micro_batches
from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.torch.model.balance import Balance
from quaver.train.learning.torch.model.decoder import Decoder, Routings, loss_and_routings, loss_of
from quaver.train.learning.torch.optimizer import mesh_of
from quaver.train.learning.torch.parallel.group import Group


class Update:
    """Batches int64 [accumulate, B, S + 1] to float32 [2 or more], the loss, the gradient's norm, and what `Balance`
    says of experts.

    The loss is the cross-entropy; the gradient is that of what keeps experts busy, too.
    With a group the batches are this rank's, and all numbers are all ranks'.
    If either is not finite, nothing is updated; the gradients stay, so that `first_gradient` can name the cause.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, group: Group | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.group = group
        #: Of a batch int64 [B, S + 1] of this rank; a pipeline's has no gradients.
        self.loss: Callable[[Tensor], Tensor] = partial(
            loss_of,
            model,
            dtype=config.dtype,
            chunk=config.loss_chunk if group is None else group.loss_chunk(config),
            cut=Tensor.contiguous if group is None else group.cut,
        )
        if group is not None and group.pipeline is not None:
            self.loss = group.pipeline.loss
        #: Of a model with experts.
        self.balance: Balance | None = None
        if isinstance(model, Decoder) and model.config.experts is not None:
            ranks = (None, 1) if group is None else (group.mean, group.sizes.fsdp)
            self.balance = Balance(model, model.config.experts, *ranks)
        #: This rank's own loss, of the last step.
        self.own: Tensor | None = None
        #: The learning rate on a GPU, where a recorded step reads it.
        self.lr: Tensor | None = None

    def set_lr(self, lr: float, device: torch.device) -> None:
        """Set the learning rate of the next update."""
        if device.type == "cuda":
            self.lr = torch.zeros((), dtype=torch.float32, device=device) if self.lr is None else self.lr
            self.lr.fill_(lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr if self.lr is None else self.lr

    def __call__(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.begin()
        total = torch.zeros((), dtype=torch.float32, device=ids.device)
        with nullcontext() if self.group is None else micro_batches(self.model):
            if self.group is not None and self.group.pipeline is not None:
                total = self.group.pipeline.step(ids)
            else:
                for left, micro_batch in zip(range(len(ids))[::-1], ids, strict=True):
                    with self.adding_up() if left else nullcontext():
                        loss, minimized = self.losses(micro_batch)
                        (minimized / len(ids)).backward()
                    total += loss.detach() / len(ids)
        if self.group is not None:
            self.own = total.clone()
            total = self.group.agreed(self.group.mean(total))
        norm = self.clip(self.config.clip or float("inf"))
        norms = torch.stack([total, norm])
        # The optimizer itself leaves everything as it is where this is not 0 (torch.amp.GradScaler's way).
        self.optimizer.found_inf = (~norms.isfinite().all()).float()  # type: ignore[attr-defined]
        capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
        if not isinstance(self.optimizer, Optimizer):
            for group in self.optimizer.param_groups:
                group["capturable"] = capturing
        self.optimizer.step()
        if self.balance is None:
            return norms
        return torch.cat([norms, self.balance.end(1 - self.optimizer.found_inf)])  # type: ignore[attr-defined]

    def losses(self, micro_batch: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy of a micro-batch, and the same with what keeps experts busy."""
        if self.balance is None:
            loss = self.loss(micro_batch)
            return loss, loss
        loss, routings = self.routed(micro_batch)
        return loss, loss + self.balance.loss(routings, len(micro_batch))

    def routed(self, batch: Tensor) -> tuple[Tensor, Routings]:
        """The loss of a batch, and how its tokens chose experts."""
        group, config = self.group, self.config
        chunk = config.loss_chunk if group is None else group.loss_chunk(config)
        return loss_and_routings(self.model, batch, config.dtype, chunk)

    def adding_up(self) -> AbstractContextManager[None]:
        """Around the backwards of all micro-batches but a step's last."""
        return self.optimizer.accumulating() if isinstance(self.optimizer, Optimizer) else nullcontext()

    def clip(self, largest: float) -> Tensor:
        """Have the gradients' norm be at most `largest`; returns the norm before."""
        if not isinstance(self.optimizer, Optimizer):
            return clip_gradients(self.model, largest, self.group)
        if self.group is None or self.group.sizes.pp == 1:
            return self.optimizer.clip_grad_norm_(largest)
        return clip_stages(self.model, self.optimizer, largest, self.group)


def clip_stages(model: nn.Module, optimizer: Optimizer, largest: float, group: Group) -> Tensor:
    """`clip_gradients` of a rank's stages, whose gradients may be in codes."""
    parameters = [*model.parameters()]
    every = group.of_all(optimizer.gradients.norm(parameters).to(group.device))
    # All ranks of a stage have its norm; a pipeline's dimension is the outermost.
    norm = torch.linalg.vector_norm(every.view(group.sizes.pp, -1)[:, 0])
    optimizer.gradients.hold_to(parameters, largest, norm)
    return norm


def clip_gradients(model: nn.Module, largest: float, group: Group | None) -> Tensor:
    """Scale a model's gradients so that their norm, over all ranks' parts, is at most `largest`; returns the norm.

    Each parameter counts once, and all ranks have the same bits of the norm: else weights of which several have the
    same would drift apart.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if group is None:
        return torch.nn.utils.clip_grad_norm_(parameters, largest)
    own = [local(parameter.grad) for parameter in parameters if group.counts(parameter)]
    norm = torch.linalg.vector_norm(group.of_all(torch.nn.utils.get_total_norm(own).to(group.device)))
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(mesh_of(parameter), []).append(parameter)
    for alike in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(alike, largest, norm)
    return norm


def local(gradient: Tensor | None) -> Tensor:
    """This rank's part."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
