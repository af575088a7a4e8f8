"""Checks of optimizer options, parameters and gradients, and a warning for learning rates too small for 8-bit
residuals.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from quaver.torch.linear.stored_weight import REPLACED, without_layer

#: Unsupported options of torch's optimizers: the reason and what to do instead, shown if they are True.
TORCHS = {
    "amsgrad": "it keeps a third moment, which no preset has: leave it out, or take torch.optim.AdamW",
    "foreach": "parameters are stepped in chunks, without copies of all states: leave it out",
    "fused": "parameters are stepped in chunks in any case: leave it out",
    "differentiable": "codes have no derivative: leave it out, or take torch's optimizer",
}
NONFINITE = ("keep", "skip", "raise")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError for unsupported options, or a TypeError for names that torch does not have."""
    for option, value in options.items():
        if option == "capturable":
            continue  # Steps are counted on the device in any case.
        if option not in TORCHS:
            raise TypeError(f"{name} has no option {option!r}")
        if value:
            raise ValueError(f"{name} was given {option}={value!r}; {TORCHS[option]}")


def check_nonfinite(nonfinite: str) -> None:
    """Raise a ValueError unless `nonfinite` is "keep", "skip" or "raise"."""
    if nonfinite not in NONFINITE:
        raise ValueError(
            f"nonfinite is {nonfinite!r}; give 'keep' (NaN propagates, as in torch), 'skip' (skip and count "
            "such a step) or 'raise'"
        )


def check_group(name: str, group: Mapping[str, Any]) -> None:
    """Check the numbers of a parameter group, like torch's optimizers.

    Raises:
        ValueError: a negative number (dampening may be), betas of 1 or more, a learning rate in a tensor of several
            elements, or a seed that is not an integer.
    """
    for option in ("lr", "eps", "weight_decay", "momentum"):
        value = group.get(option, 0.0)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} was given {option} of shape {tuple(value.shape)}; give one element")
            if not value.is_cpu:
                # Reading it would synchronize with the device.
                continue
        if not value >= 0:
            raise ValueError(f"{name} was given {option}={value!r}; give 0 or more")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2:
        raise ValueError(f"{name} was given betas={betas!r}; give two numbers")
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} was given betas[{index}]={beta!r}; give 0 or more, below 1")
    if not isinstance(group["seed"], int):
        raise ValueError(f"{name} was given seed={group['seed']!r}; give an integer, whose lower 64 bits are used")


def check_parameter(p: Tensor, rule: str, needs_matrix: bool) -> None:
    """Raise a ValueError for a parameter that no rule supports, or whose shape a matrix rule does not support.

    Args:
        p: the parameter.
        rule: name of the rule for the message.
        needs_matrix: the rule steps whole matrices.
    """
    if needs_matrix and (p.dim() not in (2, 3) or (p.dim() == 3 and 1 in p.shape[1:])):
        raise ValueError(
            f"{rule} steps matrices and stacks of them, and a parameter has shape {tuple(p.shape)}; give it to AdamW, "
            "or put it in a parameter group with rule='adamw'"
        )
    if p.is_complex():
        raise ValueError(f"a parameter is {p.dtype}; view it as real numbers: torch.view_as_real")
    if p.element_size() == 8:
        raise ValueError(f"a parameter is {p.dtype}, and steps are computed in float32: convert the model to float32")


def check_tied(parameters: Sequence[Tensor]) -> None:
    """Raise a ValueError if a parameter occurs twice in a group, which would step it twice."""
    seen: set[int] = set()
    for p in parameters:
        if id(p) in seen:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is in a group twice, and would be stepped twice; give tied "
                "weights once, as model.parameters() does"
            )
        seen.add(id(p))


def check_scaler(in_backward: bool) -> None:
    """Raise a ValueError if gradients are stepped in backward, where torch.amp.GradScaler cannot see them."""
    if in_backward:
        raise ValueError("torch.amp.GradScaler does not see gradients that are stepped in backward; train in bfloat16")


def check_replaced(parameters: Sequence[Tensor]) -> None:
    """Raise a ValueError for parameters that the model has replaced or that belong to no layer."""
    for p in parameters:
        by = getattr(p, REPLACED, None)
        if by is not None:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} was replaced by {by} after the optimizer was created, "
                "which would step a parameter that the model no longer has: create the optimizer afterwards"
            )
    for p in without_layer(parameters):
        raise ValueError(
            f"a parameter of {p.dtype} and shape {tuple(p.shape)} belongs to no layer, as in an optimizer "
            "that was pickled, or copied without its model, and gets no gradient: create an optimizer of the "
            "model's parameters, and load this one's state_dict() into it"
        )


def check_gradient(p: Tensor) -> None:
    """Raise a ValueError for a sparse gradient."""
    assert p.grad is not None
    if p.grad.is_sparse:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is sparse; use nn.Embedding with "
            "sparse=False, or torch.optim.SparseAdam for its weight"
        )


def warn_of_rate(lr: float, resolutions: Iterable[float], stochastic: bool) -> bool:
    """Warn if steps of a learning rate are too small for 8-bit residuals. Returns True if it warned.

    Args:
        lr: learning rate.
        resolutions: for each parameter, the mean distance between neighbouring values that weight and residual can
            represent.
        stochastic: residuals are rounded stochastically, so that no step is lost on average.
    """
    coarse = sorted(resolutions)
    if not coarse or lr == 0:
        return False
    middle = coarse[len(coarse) // 2]
    # Adam's updates have about the size of the learning rate.
    if lr >= middle * (1 / 16 if stochastic else 1 / 2):
        return False
    lost = (
        "stochastic rounding adds noise sixteen times as large"
        if stochastic
        else "steps below half of that are rounded away"
    )
    warnings.warn(
        f"the learning rate is {lr:.2g}, and for half of the weights 8-bit residuals have a resolution of "
        f"{middle:.2g}: {lost}; use preset balanced, whose residuals have 16 bits, from here on",
        stacklevel=4,
    )
    return True
