"""The arguments of an implementation of attention, once layouts and options are checked and put in one form."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.torch.backends.gpu.launching import capture
from quaver.torch.blocks.attention.inputs.layout import Ragged
from quaver.torch.blocks.attention.inputs.masks import Mask, Window, ahead_of_query, alibi, hidden, runs_of_keys
from quaver.torch.numerics.tracing import is_tracing
from quaver.torch.operations.selecting import unseen


class Call(NamedTuple):
    """The options beside q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""

    mask_type: str = "none"
    mask: Mask | None = None
    window: Window | None = None
    #: [1 or B, 1 or H, 1 or Sq, 1 or Sk], added to the scores.
    bias: Tensor | None = None
    #: [H] or [B, H].
    alibi_slopes: Tensor | None = None
    #: [H]: logits of one more column of the softmax, whose value is 0.
    sinks: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    dropout: float = 0.0
    #: Not None where the batch is one of sequences laid end to end.
    ragged: Ragged | None = None
    #: A query sees keys of its own run of so many positions alone.
    chunk: int | None = None

    def hidden(self, q: Tensor, k: Tensor) -> Tensor | None:
        """True where masked out, broadcastable to [B, H, Sq, Sk]; None for nowhere."""
        shape = scores_shape(q, k)
        if self.mask is not None or self.ragged is not None or not _keepable(q):
            return hidden(self.mask_type, self.mask, self.window, shape, q.device, self.ragged, self.chunk)
        return _by_position(self.mask_type, self.window, self.chunk, *shape[2:], q.device, capture.stream_of(q.device))

    def runs(self, q: Tensor, k: Tensor) -> Tensor | None:
        """`runs_of_keys` of these, where no tensor masks; None where every query sees every key."""
        return runs_of_keys(self.mask_type, self.window, q.shape[2], k.shape[2], q.device, self.ragged, self.chunk)

    def whole_bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The bias and that of ALiBi, broadcastable to [B, H, Sq, Sk]; None for neither."""
        if self.alibi_slopes is None:
            return self.bias
        ahead = ahead_of_query(self.mask_type, self.mask, scores_shape(q, k), q.device, self.ragged)
        slopes = alibi(self.alibi_slopes, ahead)
        return slopes if self.bias is None else self.bias + slopes


def _keepable(q: Tensor) -> bool:
    """Whether what is made now may serve later calls: nothing traced or faked, nor what only a CUDA graph fills."""
    if is_tracing() or type(q) is not Tensor:
        return False
    return not capture.as_captured(q.device)


@lru_cache(2)
@unseen
def _by_position(
    mask_type: str,
    window: Window | None,
    chunk: int | None,
    queries: int,
    keys: int,
    device: torch.device,
    stream: int,
) -> Tensor | None:
    """`hidden` of what does not depend on tokens, [1, 1, Sq, Sk]: the layers of a model share one for backward.

    Each stream has its own: another does not wait for the one that makes it.
    """
    with torch.inference_mode(False):
        return hidden(mask_type, None, window, (1, 1, queries, keys), device, chunk=chunk)


def scores_shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """(B, H, Sq, Sk)."""
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2]
