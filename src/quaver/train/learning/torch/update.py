"""One update of a model, as operations on its device alone: it can be recorded as a CUDA graph."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.torch.decoder import loss_of
from quaver.train.learning.torch.optimizer import layout_of
from quaver.train.learning.torch.parallel.group import Group


class Update:
    """Batches int64 [accumulate, B, S + 1] to float32 [2], the loss and the gradient's norm.

    With a group the batches are this rank's, and both numbers are all ranks'.
    If either is not finite, nothing is updated; the gradients stay, so that `first_gradient` can name the cause.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, group: Group | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.group = group
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
        total = torch.zeros((), dtype=torch.float32, device=ids.device)
        for micro_batch in ids:
            loss = loss_of(self.model, micro_batch, self.config.dtype, self.config.loss_chunk) / len(ids)
            loss.backward()
            total += loss.detach()
        if self.group is not None:
            total = self.group.mean(total)
        norm = clip_gradients(self.model, self.config.clip or float("inf"))
        norms = torch.stack([total, norm])
        # The fused optimizer itself leaves everything as it is where this is not 0 (torch.amp.GradScaler's way).
        self.optimizer.found_inf = (~norms.isfinite().all()).float()  # type: ignore[attr-defined]
        capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
        for group in self.optimizer.param_groups:
            group["capturable"] = capturing
        self.optimizer.step()
        return norms


def clip_gradients(model: nn.Module, largest: float) -> Tensor:
    """Scale a model's gradients so that their norm, over all ranks' parts, is at most `largest`; returns the norm."""
    parts: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parts.setdefault(layout_of(parameter), []).append(parameter)
    if set(parts) == {None}:
        return torch.nn.utils.clip_grad_norm_(parts[None], largest)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None]) for alike in parts.values()]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    for alike in parts.values():
        torch.nn.utils.clip_grads_with_norm_(alike, largest, norm)
    return norm
