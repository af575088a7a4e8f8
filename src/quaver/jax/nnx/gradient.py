"""Gradients of a loss, with the states of quantized layers brought to their next value on the way."""

from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from quaver.jax import state
from quaver.jax.nnx.variable import OverwriteWithGradient


def value_and_grad(
    loss: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, wrt: Any = nnx.Param
) -> Callable[..., Any]:
    """`nnx.value_and_grad` that also writes each layer's next state into the model.

    Args:
        loss: a function whose arguments `argnums` are modules.
        argnums, has_aux: as `nnx.value_and_grad` takes them.
        wrt: filter of the parameters to differentiate by, as nnx.Optimizer takes it.
    Returns:
        A function of the loss's arguments that returns (loss, gradients); the gradients are of the parameters alone and
        fit `nnx.Optimizer(model, tx, wrt=wrt).update(model, gradients)`. Layers that took no part keep their state.
    Exact: the states.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    wanted = nnx.Any(wrt, OverwriteWithGradient)
    run = nnx.value_and_grad(loss, argnums=tuple(nnx.DiffState(i, wanted) for i in numbers), has_aux=has_aux)

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        out, gradients = run(*args, **kwargs)
        of_parameters = []
        for number, gradient in zip(numbers, gradients, strict=True):
            after, rest = nnx.split_state(gradient, OverwriteWithGradient, ...)
            before = nnx.state(args[number], OverwriteWithGradient)
            following = state.update(nnx.to_pure_dict(before), nnx.to_pure_dict(after))
            nnx.replace_by_pure_dict(before, following)
            nnx.update(args[number], before)
            of_parameters.append(rest)
        return out, of_parameters[0] if isinstance(argnums, int) else tuple(of_parameters)

    return value_and_gradients
