"""What the tests of state spaces share: tensors that a scan takes, and float64's answer with all gradients."""

from typing import Any

import torch
from torch import Tensor

from quaver.torch.nn.ssm.chunked_scan import UNLIMITED, recurrence, steps_of

#: Batch, tokens, heads, features of a head, groups, features of a state.
SIZE = (2, 75, 6, 8, 3, 16)


def tensors(
    size: tuple[int, ...] = SIZE, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0
) -> dict[str, Tensor]:
    """Arguments of a scan by name, with a decay that carries state across chunks."""
    batch, tokens, heads, dim, groups, state = size
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    values = {
        "x": drawn(batch, tokens, heads, dim).to(dtype),
        "dt": drawn(batch, tokens, heads).to(dtype),
        "A": -torch.rand(heads, generator=generator) * scale,
        "B": (drawn(batch, tokens, groups, state) * state**-0.5).to(dtype),
        "C": drawn(batch, tokens, groups, state).to(dtype),
        "D": drawn(heads),
        "dt_bias": drawn(heads) - 2,
        "initial_states": drawn(batch, heads, dim, state),
    }
    return values


def leaves(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone().requires_grad_() for name, value in values.items()}


def exact(values: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Outputs, last states and, by the order of the names, the gradients, of float64's recurrence."""
    wide = {name: value.detach().double().requires_grad_() for name, value in values.items()}
    steps = steps_of(
        wide["dt"], wide.get("dt_bias"), options.get("dt_softplus", True), options.get("dt_limit", UNLIMITED)
    )
    of_tokens = wide["x"], steps, wide["A"], wide["B"], wide["C"]
    results = recurrence(*of_tokens, wide.get("D"), wide.get("initial_states"))
    return differentiated(results, wide)


def differentiated(results: tuple[Tensor, Tensor], values: dict[str, Tensor]) -> list[Tensor]:
    """Both results and the gradients of their inputs, for fixed random output gradients."""
    grads = [drawn_gradient(y, n) for n, y in enumerate(results)]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, list(values.values()), grads)]


def drawn_gradient(y: Tensor, seed: int) -> Tensor:
    """Of a result: the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(90 + seed)
    return torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype)


def named(values: dict[str, Tensor]) -> list[str]:
    return ["y", "last states", *(f"gradient of {name}" for name in values)]
