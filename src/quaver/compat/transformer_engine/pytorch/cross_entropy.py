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
    """Cross entropy of logits [..., V], or of vocabulary-parallel logits of a group; averaged if `reduce_loss`.

    Saved for backward are the logits and three numbers per token; under torch.compile the compiler decides.

    Args:
        target: one per token, in any shape.
        reduce_loss: average over the tokens that are not ignored; 0 if all are.
        overwrite_input: backward writes the gradient into the memory of the logits.
    Raises:
        ValueError: targets of the wrong number or outside the vocabulary, or non-contiguous logits to overwrite.
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
