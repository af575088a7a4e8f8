"""Transformer Engine's `parallel_cross_entropy`."""

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.parallel.tensor.vocab import cross_entropy, cross_entropy_of_all


def parallel_cross_entropy(
    inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
    dist_process_group: Any = None, ignore_idx: int = -100, is_cg_capturable: bool = False, *,
    overwrite_input: bool = False,
) -> Tensor:  # fmt: skip
    """Losses of logits [..., words], or of this rank's words of a group's; their mean if `reduce_loss`.

    The logits themselves are saved for backward, with three numbers a token; a compiler saves what it likes.

    Args:
        target: as many as there are tokens, in any shape.
        reduce_loss: the mean is over the tokens that are not ignored, and 0 where all are.
        overwrite_input: backward writes the gradient into the memory of the logits.
    Raises:
        ValueError: targets that do not fit or are no words, logits to overwrite that are not contiguous.
    """
    if target.numel() * inp.shape[-1] == inp.numel():
        target = target.reshape(inp.shape[:-1])
    reduction = "sum" if reduce_loss else "none"
    options: Any = {"ignore_index": ignore_idx, "label_smoothing": label_smoothing, "reduction": reduction}
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        losses = cross_entropy(inp, target, dist_process_group, overwrite=overwrite_input, **options)
    elif is_tracing():
        losses = F.cross_entropy(inp.float().flatten(0, -2), target.flatten().long(), **options)
        losses = losses if reduce_loss else losses.view(target.shape)
    else:
        losses = cross_entropy_of_all(inp, target, overwrite=overwrite_input, **options)
    return losses / (target != ignore_idx).sum().clamp(min=1) if reduce_loss else losses
