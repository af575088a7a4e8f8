"""Transformer Engine's `parallel_cross_entropy`."""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.parallel.tensor.words.loss import cross_entropy


def parallel_cross_entropy(
    inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
    dist_process_group: Any = None, ignore_idx: int = -100, is_cg_capturable: bool = False,
) -> Tensor:  # fmt: skip
    """Losses of logits [..., words], or of this rank's words of a group's; their mean if `reduce_loss`."""
    options: Any = {"ignore_index": ignore_idx, "label_smoothing": label_smoothing}
    reduction = "mean" if reduce_loss else "none"
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        return cross_entropy(inp, target, dist_process_group, reduction=reduction, **options)
    losses = F.cross_entropy(inp.float().flatten(0, -2), target.flatten().long(), reduction=reduction, **options)
    return losses if reduce_loss else losses.view(target.shape)
