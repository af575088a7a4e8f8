"""The recurrence of a state space with one decay a head, token by token: what a scan computes, plain and slow.

    h_t = exp(A dt_t) h_(t-1) + dt_t x_t ⊗ B_t          h [P, N] for each head
    y_t = h_t C_t + D x_t

In the dtype of what it is given, differentiable by autograd any number of times and under transforms of torch.func.
Source: Dao and Gu 2024, arXiv:2405.21060.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

#: No bound below and none above.
UNLIMITED = (0.0, float("inf"))


def steps_of(
    dt: Tensor,
    bias: Tensor | None = None,
    softplus: bool = True,
    limit: tuple[float, float] = UNLIMITED,
) -> Tensor:
    """The steps: softplus(dt + bias), held within the limit. NaN stays.

    Args:
        dt: [..., H]. bias: [H].
    """
    dt = dt if bias is None else dt + bias
    dt = F.softplus(dt) if softplus else dt
    return dt if softplus and tuple(limit) == UNLIMITED else dt.clamp(*limit)


def step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token: its output [batch, H, P], and the state after it.

    Args:
        state: [batch, H, P, N]. x: [batch, H, P]. dt: the step itself, [batch, H]. A: [H]. B, C: [batch, G, N].
        D: [H] or [H, P].
    """
    batch, heads, dim, size = state.shape
    groups = B.shape[1]
    shared = (batch, groups, heads // groups)
    decay = (dt * A).exp()[..., None, None]
    added = (dt[..., None] * x).view(*shared, dim, 1) * B[:, :, None, None, :]
    state = state * decay + added.view(batch, heads, dim, size)
    y = (state.view(*shared, dim, size) @ C[:, :, None, :, None]).view(batch, heads, dim)
    return (y if D is None else y + skip(D) * x), state


def recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs [batch, T, H, P], and the state after the last token [batch, H, P, N].

    Args:
        x: [batch, T, H, P]. dt: the steps themselves, [batch, T, H]. A: [H]. B, C: [batch, T, G, N], each group serving
            H / G heads. D: [H] or [H, P]. initial: [batch, H, P, N]; None is zeros.
    NaN makes all later tokens of its head NaN, and no earlier one.
    """
    batch, tokens, heads, dim = x.shape
    state = x.new_zeros(batch, heads, dim, B.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(tokens):
        y, state = step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D)
        outputs.append(y)
    return (torch.stack(outputs, 1) if outputs else x.new_empty(x.shape)), state


def skip(D: Tensor) -> Tensor:
    """D [H] or [H, P] as it multiplies x [..., H, P]."""
    return D[:, None] if D.dim() == 1 else D
