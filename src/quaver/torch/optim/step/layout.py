"""Where a parameter's tensors lie: whole on one device, or as this rank's rows of a DTensor."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.linear import store_weight
from quaver.torch.linear.stored_weight import CODES, dequantized
from quaver.torch.optim import master_weights
from quaver.torch.optim.quantized_gradient import unwrapped
from quaver.torch.optim.step.noise import Place
from quaver.torch.optim.step.step import ParameterTensors, StepConfig
from quaver.torch.state.layer_state import state_of

# ---- stacks ----------------------------------------------------------------------------------------------
# Stacks of matrices in codes, as experts lie in: each matrix has scales of its own, and steps as if it were alone.


def is_stack(p: Tensor, spec: QuantSpec | None, whole: bool = False) -> bool:
    """Whether a parameter is several matrices that step one by one: of codes, or under a rule of whole matrices.

    Args:
        spec: of codes; None of a float, all of whose rows are alike.
        whole: whether the rule needs all of a matrix at once.
    """
    return (spec is not None or whole) and p.dim() == 3


def check(p: Tensor, way: StepConfig, preset: str) -> None:
    """Refuse what has one scale for all matrices of a stack. Raises: ValueError."""
    in_all = any(spec.of.scaled and spec.block is None for spec in way.moments) or way.master_format.whole
    if in_all and is_stack(p, way.master_format.spec, way.rule.whole):
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


# ---- layout ----------------------------------------------------------------------------------------------


def local(t: Tensor) -> Tensor:
    """This rank's part; all of a tensor that is whole. Of one that fully_shard gathers as codes, what it holds."""
    if not isinstance(t, DTensor):
        return t
    part = t.to_local()
    plain: Tensor = getattr(part, "plain", part)
    return plain


def like(p: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """A state that lies as the parameter does, so that checkpoints and meshes see what it is a part of.

    Args:
        part: this rank's.
        shape: of the whole state.
    """
    if not isinstance(p, DTensor) or part.dim() == 0:
        return part
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def divided(p: Tensor) -> list[tuple[int, int]]:
    """The dimensions of a parameter that ranks have parts of, and the mesh's dimension of these, in order of cutting.

    fully_shard cuts what tensor parallelism has cut before it, and stands before it in the mesh.
    """
    if not isinstance(p, DTensor):
        return []
    cuts = [(p.placements[over].dim, over) for over in range(p.device_mesh.ndim) if _cuts(p, over)]
    later = {over for _, over in cuts if hasattr(p.placements[over], "split_factor")}
    return [cut for cut in cuts if cut[1] not in later] + [cut for cut in reversed(cuts) if cut[1] in later]


def _cuts(p: DTensor, over: int) -> bool:
    return hasattr(p.placements[over], "dim") and p.device_mesh.size(over) > 1


def groups(p: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks have other parts of a parameter each, those of one after those of the other."""
    return tuple(p.device_mesh.get_group(over) for _, over in divided(p))  # type: ignore[attr-defined]


def sharing(p: Tensor) -> tuple[Any, ...]:
    """The process groups of a sharded parameter, those of its replicas included; none of an unsharded one."""
    mesh: Any = p.device_mesh if divided(p) else None  # type: ignore[attr-defined]
    return () if mesh is None else tuple(mesh.get_group(over) for over in range(mesh.ndim) if mesh.size(over) > 1)


def place(p: Tensor) -> Place:
    """Where this rank's part of a parameter lies in the whole."""
    start, stop = [0] * p.dim(), list(p.shape)
    for dim, over in divided(p):
        mesh: Any = p.device_mesh  # type: ignore[attr-defined]
        part = -(-(stop[dim] - start[dim]) // mesh.size(over))
        start[dim] = min(stop[dim], start[dim] + part * mesh.get_local_rank(over))
        stop[dim] = min(stop[dim], start[dim] + part)
    own = tuple(local(p).shape)
    assert own == tuple(b - a for a, b in zip(start, stop, strict=True)), f"{own} of {start} to {stop}"
    return Place(tuple(start), own, tuple(p.shape))


def gradient(p: Tensor) -> Tensor:
    """This rank's part of a gradient, which lies as its parameter does; all ranks call it alike."""
    assert p.grad is not None
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        # As of a parameter that ranks have copies of, where each has a part of the sum.
        return p.grad.redistribute(placements=p.placements).to_local()
    return part_of_gradient(p)


def part_of_gradient(p: Tensor) -> Tensor:
    """What this rank has of a gradient, a plain tensor unless it is stored as codes."""
    assert p.grad is not None
    return unwrapped(local(p.grad))


def agreed(finite: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """Whether all ranks' parts of parameters are finite, bool [] each, from whether each one's own are."""
    if not parameters:
        return finite
    bits = torch.stack([ok.to(parameters[0].device) for ok in finite]).logical_not().int()
    for group in {group: None for p in parameters for group in groups(p)}:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return [*(bits == 0).unbind()]


def check_divided(p: Tensor, way: StepConfig, preset: str) -> None:
    """Refuse what a rank cannot step with a part of a parameter alone. Raises: ValueError."""
    cuts = divided(p)
    if isinstance(p, DTensor) and p.dtype in CODES and p.dim() == 3:
        raise ValueError(
            f"a stack of matrices of {p.dtype} was given to fully_shard, which rounds gradients to its dtype: call "
            "quaver.torch.dequantize_weights(model) before fully_shard, or leave it out with ignored_params="
        )
    if isinstance(p, DTensor) and p.dtype in CODES:
        raise ValueError(
            f"a parameter of {p.dtype} was given to fully_shard as it is, which rounds gradients to its dtype: call "
            "quaver.torch.parallel.gather_quantized(model) before fully_shard"
        )
    if not cuts:
        return
    lies = f"a parameter of shape {tuple(p.shape)} lies in parts on the ranks of {p.device_mesh}"  # type: ignore[attr-defined]
    rule = type(way.rule).__name__
    if way.rule.whole:
        raise ValueError(
            f"{lies}, and {rule} needs whole matrices: give it to AdamW or Lion, or leave it out of fully_shard with "
            "ignored_params="
        )
    if any(spec.of.scaled and spec.block is None for spec in way.moments) or way.master_format.whole:
        raise ValueError(
            f"{lies}, and preset {preset!r} has one scale for all of it: take one with scales of blocks, such as "
            "'balanced' or 'lean'"
        )
    of_codes = way.master_format.spec
    if of_codes is not None and (len(cuts) > 1 or cuts[0][0] != 0):
        raise ValueError(f"{lies}, which divide more than rows of codes: let fully_shard alone divide it, by rows")
    height = 1 if of_codes is None else of_codes.block[0] or 1
    if way.predicts and p.shape[0] % (height * p.device_mesh.size(cuts[0][1])) and height > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"{lies}, which divide blocks of {height} whole rows, and preset {preset!r} knows their scales before a "
            "step: give fewer ranks, or a recipe with another block"
        )
    ranks = prod(p.device_mesh.size(over) for dim, over in cuts if dim == p.dim() - 1)  # type: ignore[attr-defined]
    for spec in way.moments:
        if ranks > 1 and spec.of.scaled and spec.block is not None and p.shape[-1] % (spec.block * ranks):
            raise ValueError(
                f"{lies}, of which {ranks} divide its {p.shape[-1]} columns, and preset {preset!r} has a scale for "
                f"each {spec.block}: take preset='exact' or 'float32' for it, or fewer ranks for tensor parallelism"
            )


def value_of(p: Tensor) -> Tensor:
    """The weight as float32, this rank's part."""
    if not store_weight.holds_codes(p):
        return local(p).detach().float()
    layer: Any = store_weight.owner(p)
    assert layer is not None
    if not divided(p):
        return dequantized(layer, local(p), torch.float32)
    master_format, (codes, scale) = in_own_rows(p, master_weights.MasterFormat("residual", layer.weight_spec))
    assert master_format.spec is not None
    return master_weights.values(master_format.spec, codes, scale)


def initial_of(p: Tensor, way: StepConfig) -> Tensor | None:
    """The value in high precision that a weight in codes was made of, float32 on its device, if the layer kept it: this
    rank's rows."""
    if way.master_format.spec is None or not way.master_format.states:
        return None
    owner = store_weight.owner(p)
    initial = None if owner is None else state_of(owner).initial
    if initial is None:
        return None
    first = place(p)
    return initial[first.start[0] :][: first.part[0]].to(p.device, torch.float32)


def weight_of(p: Tensor, way: StepConfig) -> list[Tensor]:
    """The weight as a GEMM reads it: itself, and the scales of codes, those of this rank's rows."""
    weight = [local(p).detach()]
    spec = way.master_format.spec
    if spec is not None:
        owner = store_weight.owner(p)
        assert owner is not None
        scale: Any = owner._buffers["weight_scale"]
        every = spec.block[0] is None or is_stack(p, spec)
        weight.append(scale if every else scale[block_rows(place(p), spec.block[0])])  # type: ignore[arg-type]
    return weight


def versions(p: Tensor) -> list[tuple[int, int]]:
    """(address, version) of a weight of codes and of its scales: others after a write that autograd sees."""
    owner = store_weight.owner(p)
    scale = None if owner is None else owner._buffers["weight_scale"]
    tensors = [t for t in (local(p), scale) if t is not None]
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


def block_rows(part: Place, height: int) -> slice:
    """The rows of blocks that a part of a matrix has something of."""
    start, stop = part.start[0], part.start[0] + part.part[0]
    return slice(start // height, max(-(-stop // height), start // height) if stop > start else start // height)


def in_own_rows(
    p: Tensor, master_format: master_weights.MasterFormat
) -> tuple[master_weights.MasterFormat, list[Tensor]]:
    """`weight_of`, to be read: where this rank's rows begin within a block, or are those of several matrices, each
    row with scales of its own."""
    codes, *scales = weight_of(p, StepConfig(None, master_format, ()))  # type: ignore[arg-type]
    spec = master_format.spec
    if spec is not None and is_stack(p, spec):
        return master_format.by_rows, [rows(codes), scales_by_rows(p, spec, *scales)]
    if spec is None or spec.block[0] in (None, 1) or not divided(p):
        return master_format, [codes, *scales]
    first = place(p)
    own = torch.arange(first.start[0], first.start[0] + first.part[0], dtype=torch.int64, device=codes.device)
    height: Any = spec.block[0]
    return master_format.by_rows, [codes, scales[0][own // height - first.start[0] // height]]


def in_rows(t: Tensor) -> Tensor:
    """A tensor that lies row by row: itself, or a copy of one that lies otherwise, as channels_last does."""
    return t if t.dim() <= 2 or t.is_contiguous() else t.contiguous()


#: Elements of a row, below which it takes in the dimension before it: each row has a scale of its own.
SHORT = 64
#: The longest block of any preset: where ranks' parts of a column are whole ones, no block has elements of two.
WIDEST = 256


def leading(p: Tensor, whole: bool) -> int:
    """How many dimensions of a parameter count its rows; the others, flattened, are a row, which blocks divide.

    All but the last, or but the spatial ones and the channels of a convolution's weight; none of a column [N, 1].

    Args:
        whole: whether the rule needs all of a matrix at once.
    """
    last, cuts = max(p.dim() - 1, 0), divided(p)
    if whole or not p.numel() or store_weight.holds_codes(p) or any(dim for dim, _ in cuts):
        return last
    at = last
    while at > 1 and prod(p.shape[at:]) < SHORT:
        at -= 1
    column = p.dim() > 1 and prod(p.shape[1:]) == 1 and local(p).is_contiguous()
    ranks = prod(p.device_mesh.size(over) for _, over in cuts)  # type: ignore[attr-defined]
    return 0 if column and (not cuts or p.shape[0] % (WIDEST * ranks) == 0) else at


def flat(shape: Sequence[int], rows_of: int) -> tuple[int, ...]:
    """A shape whose first dimensions, so many, count rows, and whose others are flattened."""
    return (*shape[:rows_of], prod(shape[rows_of:])) if rows_of < len(shape) - 1 else tuple(shape)


def flat_place(p: Tensor, rows_of: int) -> Place:
    """`place` of a parameter whose last dimensions are flattened; none of these but a column's is in parts on ranks."""
    start, part, whole = place(p)
    if rows_of >= len(part) - 1:
        return Place(start, part, whole)
    return Place((*start[:rows_of], 0 if rows_of else start[0]), flat(part, rows_of), flat(whole, rows_of))


def as_rows(parts: ParameterTensors, number: int = 0) -> ParameterTensors:
    """All tensors as matrices: leading dimensions are rows, and a vector is one.

    Args:
        number: of rows; 0: all dimensions but the last count them.
    """
    if parts.weight[0].dim() == 0:
        # One number, such as a temperature: no state of it is in codes, so no scale is among its tensors.
        of_one = [[t.view(1, 1) for t in tensors] for tensors in (parts.weight, (m for (m,) in parts.moments))]
        return ParameterTensors(tuple(of_one[0]), tuple((t,) for t in of_one[1]), (parts.gradient[0].view(1, 1),))
    moments = tuple(tuple(rows(t, number) for t in held) for held in parts.moments)
    weight, gradient = (tuple(rows(t, number) for t in tensors) for tensors in (parts.weight, parts.gradient))
    return ParameterTensors(weight, moments, gradient)


def rows(t: Tensor, number: int = 0) -> Tensor:
    """A tensor as a matrix, of so many rows if a number is given; one scale in all, [], stays."""
    if number and t.dim():
        return t if t.dim() == 2 and t.shape[0] == number else in_rows(t).reshape(number, -1)
    if t.dim() == 2 or t.dim() == 0:
        return t
    return t.view(1, -1) if t.dim() < 2 else in_rows(t).view(-1, t.shape[-1])
