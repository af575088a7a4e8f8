"""One update of a model, as operations on its device alone: it can be recorded as a CUDA graph."""

import torch
from torch import Tensor, nn

from quaver.train.configuration.config import TrainConfig
from quaver.train.learning.torch.decoder import loss_of


class Update:
    """Batches int64 [accumulate, B, S + 1] to float32 [2], the loss and the gradient's norm.

    If either is not finite, nothing is updated; the gradients stay, so that `first_gradient` can name the cause.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
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
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or float("inf"))
        norms = torch.stack([total, norm])
        # The fused optimizer itself leaves everything as it is where this is not 0 (torch.amp.GradScaler's way).
        self.optimizer.found_inf = (~norms.isfinite().all()).float()  # type: ignore[attr-defined]
        capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()
        for group in self.optimizer.param_groups:
            group["capturable"] = capturing
        self.optimizer.step()
        return norms
