"""What keeps experts evenly busy: losses of a `Routing`, and a bias that is moved in place of a loss.

All are functions of what `route` gives: a layer has no loss of its own, and nothing is remembered between calls.
"""

import torch
from torch import Tensor

from quaver.torch.blocks.experts.routing import Routing


def token_counts(indices: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """How many choices fell on each expert.

    Args:
        indices: [T, k].
        mask: bool [T], False for tokens that do not count, such as padding.
    Returns:
        int64 [experts]. Exact.
    """
    ones = torch.ones_like(indices) if mask is None else mask.to(indices.dtype).unsqueeze(1).expand_as(indices)
    counts = torch.zeros(experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.reshape(-1), ones.reshape(-1))


def balance_loss(
    routing: Routing, *, sequences: int = 1, mask: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """E × the sum over experts of (share of choices that fell on it) × (mean of its probability).

    It is 1 where experts are equally busy and equally probable. The share has no gradient.

    Args:
        routing: of T tokens.
        sequences: into so many parts of T / sequences tokens, one after the other, is the batch divided, and the loss
            is the mean of theirs: DeepSeek's sequence-wise loss. 1 balances the whole batch, as Switch does.
        mask: bool [T], False for tokens that do not count, such as padding.
        counts: [E], choices of more tokens than these, such as `token_counts` summed over ranks: the shares are theirs,
            which balances a batch that lies on many ranks. With sequences=1 alone.
    Returns:
        A float32 scalar, differentiable; 0 of no tokens. It is 1 / k of the one in transformers, which sums shares.
    Raises:
        ValueError: sequences that do not divide the tokens, a mask or counts of another shape.
    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4; Lepikhin et al. 2020, arXiv:2006.16668; DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20; Qiu et al. 2025, arXiv:2501.11873, of counts.
    """
    indices, probabilities = routing.indices, routing.probabilities
    (tokens, k), experts = indices.shape, probabilities.shape[1]
    _check(tokens, sequences, mask)
    if counts is not None and (sequences != 1 or tuple(counts.shape) != (experts,)):
        raise ValueError(f"counts are of a whole batch: give [{experts}] with sequences=1, not {tuple(counts.shape)}")
    each = tokens // sequences
    kept = torch.ones_like(probabilities[:, 0]) if mask is None else mask.to(probabilities.dtype)
    if mask is not None:
        probabilities = probabilities.masked_fill(~mask.unsqueeze(1), 0)
    if counts is None:
        ones = kept.unsqueeze(1).expand(tokens, k).reshape(sequences, each * k)
        chosen = kept.new_zeros((sequences, experts))
        chosen = chosen.scatter_add(1, indices.reshape(sequences, each * k), ones)
    else:
        chosen = counts.to(kept.dtype).unsqueeze(0)
    shares = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    size = kept.view(sequences, each).sum(1, keepdim=True).clamp(min=1)
    means = probabilities.view(sequences, each, experts).sum(1) / size
    return experts * (shares.detach() * means).sum(1).mean()


def z_loss(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of the square of log(sum of exp(logits)), which keeps logits small.

    Args:
        mask: bool [T], False for tokens that do not count.
    Returns:
        A scalar of the logits' dtype, differentiable; 0 of no tokens.
    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    logits = routing.logits
    _check(logits.shape[0], 1, mask)
    squares = torch.logsumexp(logits, -1).square()
    if mask is None:
        return squares.sum() / max(1, logits.shape[0])
    return torch.where(mask, squares, 0.0).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3) -> None:
    """Raise the bias of experts with fewer choices than the mean by `rate`, and lower it of those with more, in place.

    Call it once a step, with the choices of all ranks and micro-batches: the bias then balances without a loss.

    Args:
        bias: [E], as `route` takes it: float32, since steps of 1e-3 vanish in 16 bits.
        counts: [E], of `token_counts`.
    Raises:
        ValueError: shapes that differ, or a bias in 16 bits.
    Exact. Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437.
    """
    if bias.shape != counts.shape or bias.dim() != 1:
        raise ValueError(f"bias and counts are of the same experts; these are {tuple(bias.shape)} and {counts.shape}")
    if bias.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"bias is {bias.dtype}, in which steps of {rate} vanish: keep it in float32")
    # Compared as whole numbers: a float32 mean of large counts is off.
    bias += rate * torch.sign(counts.sum() - counts * counts.shape[0]).to(bias.dtype)


def _check(tokens: int, sequences: int, mask: Tensor | None) -> None:
    if sequences < 1 or tokens % sequences:
        raise ValueError(f"{sequences} sequences do not divide {tokens} tokens: give the batch's number of sequences")
    if mask is not None and (tuple(mask.shape) != (tokens,) or mask.dtype is not torch.bool):
        raise ValueError(
            f"mask is bool [{tokens}], one a token; this one is {mask.dtype} {tuple(mask.shape)}: flatten it"
        )
