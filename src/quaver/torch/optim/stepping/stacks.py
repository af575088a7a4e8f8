"""Stacks of matrices in codes, as experts lie in: each matrix has scales of its own, and steps as if it were alone."""

from math import prod

import torch
from torch import Tensor

from quaver.core.spec import QuantSpec
from quaver.torch.optim.stepping.pieces import Way


def is_stack(p: Tensor, spec: QuantSpec | None, whole: bool = False) -> bool:
    """Whether a parameter is several matrices that step one by one: of codes, or under a rule of whole matrices.

    Args:
        spec: of codes; None of a float, all of whose rows are alike.
        whole: whether the rule needs all of a matrix at once.
    """
    return (spec is not None or whole) and p.dim() == 3


def check(p: Tensor, way: Way, preset: str) -> None:
    """Refuse what has one scale for all matrices of a stack. Raises: ValueError."""
    in_all = any(spec.of.scaled and spec.block is None for spec in way.moments) or way.keeping.whole
    if in_all and is_stack(p, way.keeping.spec, way.rule.whole):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is a stack of matrices, and preset {preset!r} has one "
            "scale for all of a parameter: take one with scales of blocks, such as 'balanced' or 'lean'"
        )


def scales_by_rows(p: Tensor, spec: QuantSpec, scale: Tensor) -> Tensor:
    """The scales of each row of a stack's matrices, one below the other: [groups * rows, blocks of a row]."""
    groups, rows = p.shape[0], prod(p.shape[1:-1])
    if spec.block[0] is None:
        return scale.reshape(groups, 1, -1).expand(-1, rows, -1).reshape(groups * rows, -1)
    return scale.repeat_interleave(spec.block[0], 1)[:, :rows].reshape(groups * rows, -1)


def blocks_of(p: Tensor, spec: QuantSpec, group: int) -> slice:
    """Which rows of a stack's scales, one matrix's below the other's, are a matrix's."""
    height = spec.block[0]
    each = 1 if height is None else -(-p.shape[1] // height)
    return slice(group * each, (group + 1) * each)


def together(each: list[Tensor], p: Tensor) -> Tensor:
    """One number or matrix of each group in one tensor, [groups, ...]."""
    return torch.stack(each) if each else torch.empty((0,), dtype=torch.float32, device=p.device)
