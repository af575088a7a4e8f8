"""Checks of options and parameters when an optimizer is created."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.torch.linear import stored_weight
from quaver.torch.optim.layout import is_stack, shardings
from quaver.torch.optim.step import StepConfig

#: Unsupported options of torch's optimizers: the reason and what to do instead, shown if they are True.
UNSUPPORTED = {
    "amsgrad": "it keeps a third moment, which no preset has: leave it out, or take torch.optim.AdamW",
    "foreach": "parameters are stepped in chunks, without copies of all states: leave it out",
    "fused": "parameters are stepped in chunks in any case: leave it out",
    "differentiable": "codes have no derivative: leave it out, or take torch's optimizer",
}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError for unsupported options, or a TypeError for names that torch does not have."""
    for option, value in options.items():
        if option == "capturable":
            continue  # Steps are counted on the device in any case.
        if option not in UNSUPPORTED:
            raise TypeError(f"{name} has no option {option!r}")
        if value:
            raise ValueError(f"{name} was given {option}={value!r}; {UNSUPPORTED[option]}")


def check_group(name: str, group: Mapping[str, Any]) -> None:
    """Check the numbers of a parameter group, like torch's optimizers.

    Raises:
        ValueError: a negative number (dampening may be), betas of 1 or more, a learning rate in a tensor of several
            elements, or a seed that is not an integer.
    """
    for option in ("lr", "eps", "weight_decay", "momentum", "warmup_steps", "weight_lr_power", "r"):
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


def check_stack(p: Tensor, config: StepConfig, preset: str) -> None:
    """Raise a ValueError if a preset would use one scale for all matrices of a stack."""
    in_all = (
        any(spec.of.scaled and spec.block is None for spec in config.moments) or config.weight_format.needs_whole_weight
    )
    if in_all and is_stack(p, config.weight_format.code_spec, config.rule.needs_matrix):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is a stack of matrices, and preset {preset!r} has one "
            "scale per parameter: use one with block scales, such as 'balanced' or 'lean'"
        )


def check_sharded(p: Tensor, config: StepConfig, preset: str) -> None:
    """Raise a ValueError if a sharded parameter cannot be stepped shard by shard."""
    sharded_dims = shardings(p)
    if isinstance(p, DTensor) and stored_weight.owner(p) is not None and not stored_weight.holds_codes(p):
        raise ValueError(
            f"a stored weight of shape {tuple(p.shape)} was passed directly to fully_shard, which shards its values: "
            "call quaver.torch.parallel.gather_quantized(model) before fully_shard"
        )
    if not sharded_dims:
        return
    sharded = f"a parameter of shape {tuple(p.shape)} is sharded over the ranks of {p.device_mesh}"  # type: ignore[attr-defined]
    rule = config.rule.name
    if config.rule.needs_matrix:
        raise ValueError(
            f"{sharded}, and {rule} needs whole matrices: give it to AdamW or Lion, or exclude it with "
            "fully_shard(..., ignored_params=...)"
        )
    if any(spec.of.scaled and spec.block is None for spec in config.moments) or config.weight_format.needs_whole_weight:
        raise ValueError(
            f"{sharded}, and preset {preset!r} has one scale for the whole parameter: use one with block scales, "
            "such as 'balanced' or 'lean'"
        )
    code_spec = config.weight_format.code_spec
    if code_spec is not None and (len(sharded_dims) > 1 or sharded_dims[0][0] != 0):
        raise ValueError(f"{sharded} by more than rows, which codes do not support: shard it by fully_shard only")
    height = 1 if code_spec is None else code_spec.block[0] or 1
    if config.predicts_scale and p.shape[0] % (height * p.device_mesh.size(sharded_dims[0][1])) and height > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"{sharded}, which cuts blocks of {height} whole rows, and preset {preset!r} needs their scales "
            "before a step: use fewer ranks, or a recipe with another block"
        )
    ranks = prod(p.device_mesh.size(over) for dim, over in sharded_dims if dim == p.dim() - 1)  # type: ignore[attr-defined]
    for spec in config.moments:
        if ranks > 1 and spec.of.scaled and spec.block is not None and p.shape[-1] % (spec.block * ranks):
            raise ValueError(
                f"{sharded}, {ranks} of them along its {p.shape[-1]} columns, and preset {preset!r} has a scale "
                f"for each {spec.block}: use preset='exact' or 'float32' for it, or fewer ranks for tensor "
                "parallelism"
            )
