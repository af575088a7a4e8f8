"""What an implementation of attention is asked, once layouts and options are checked and put in one form."""

from typing import NamedTuple

from torch import Tensor

from quaver.torch.attention.layout import Ragged
from quaver.torch.attention.masks import Mask, Window, ahead_of_query, alibi, hidden


class Call(NamedTuple):
    """The options beside q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv]."""

    mask_type: str
    mask: Mask | None
    window: Window | None
    #: [1 or B, 1 or H, 1 or Sq, 1 or Sk], added to the scores.
    bias: Tensor | None
    #: [H] or [B, H].
    alibi_slopes: Tensor | None
    #: [H]: logits of one more column of the softmax, whose value is 0.
    sinks: Tensor | None
    scale: float
    soft_cap: float | None
    dropout: float
    #: Not None where the batch is one of sequences laid end to end.
    ragged: Ragged | None

    def hidden(self, q: Tensor, k: Tensor) -> Tensor | None:
        """True where masked out, broadcastable to [B, H, Sq, Sk]; None for nowhere."""
        return hidden(self.mask_type, self.mask, self.window, scores_shape(q, k), q.device, self.ragged)

    def whole_bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The bias and that of ALiBi, broadcastable to [B, H, Sq, Sk]; None for neither."""
        if self.alibi_slopes is None:
            return self.bias
        ahead = ahead_of_query(self.mask_type, self.mask, scores_shape(q, k), q.device, self.ragged)
        slopes = alibi(self.alibi_slopes, ahead)
        return slopes if self.bias is None else self.bias + slopes


def scores_shape(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """(B, H, Sq, Sk)."""
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2]
