"""The plain attention that the others are held against: every score is there, in float32 or float64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.torch.blocks.attention.inputs.call import Call


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """softmax(q kᵀ scale) v, [B, H, Sq, Dv] in q's dtype, of q [B, H, Sq, D], k [B, G, Sk, D] and v [B, G, Sk, Dv].

    Bounded: relative RMS 1e-6 of float64 in float32, without dropout.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = q.shape[1], k.shape[1]
    # Each head of k and v serves the next heads / groups heads of q: [B, G, H / G, S, D].
    wide, keys, values = q.to(dtype).unflatten(1, (groups, heads // groups)), k.to(dtype), v.to(dtype)
    scores = (wide @ keys.unsqueeze(2).mT).flatten(1, 2) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    bias, hidden = call.whole_bias(q, k), call.hidden(q, k)
    if bias is not None:
        scores = scores + bias.to(dtype)
        hides = bias.detach() == -torch.inf
        hidden = hides if hidden is None else hidden | hides
    probabilities = F.dropout(softmax(scores, hidden, call.sinks), call.dropout)
    out = probabilities.unflatten(1, (groups, heads // groups)) @ values.unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype)


def softmax(scores: Tensor, hidden: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Over the last axis of [B, H, Sq, Sk], with one more column of logits sinks [H] that is left out again.

    Rows that are hidden throughout are 0, and so are their gradients.
    """
    keys = scores.shape[-1]
    empty = None
    if hidden is not None:
        empty = hidden.all(-1, keepdim=True)
        # A row of -inf alone would be NaN, in the gradient too.
        scores = torch.where(hidden, torch.where(empty, 0.0, -torch.inf).to(scores.dtype), scores)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = torch.softmax(scores, -1)[..., :keys]
    return probabilities if empty is None else probabilities.masked_fill(empty, 0)
