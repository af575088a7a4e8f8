"""Layout of a parameter's tensors: whole on one device, this rank's shard of a DTensor, or a stack of matrices."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.recipes.spec import QuantSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import scales_of
from quaver.torch.optim import master_weights
from quaver.torch.optim.quantized_gradient import unwrapped
from quaver.torch.optim.step.noise import ShardPosition
from quaver.torch.optim.step.step import ParameterTensors, StepConfig
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.layer_state import state_of

# ---- stacks ----
# Stacks of matrices such as expert weights: each matrix has its own scales and steps separately.


def is_stack(p: Tensor, spec: QuantSpec | None, needs_matrix: bool = False) -> bool:
    """True if a parameter is a stack whose matrices step separately: stored as codes, or under a rule for whole
    matrices.

    Args:
        p: the parameter.
        spec: spec of its codes; None for a float.
        needs_matrix: the rule needs a whole matrix at once.
    """
    return (spec is not None or needs_matrix) and p.dim() == 3


def check(p: Tensor, config: StepConfig, preset: str) -> None:
    """Raise a ValueError if a preset would use one scale for all matrices of a stack."""
    in_all = (
        any(spec.of.scaled and spec.block is None for spec in config.moments) or config.weight_format.needs_whole_weight
    )
    if in_all and is_stack(p, config.weight_format.code_spec, config.rule.needs_matrix):
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is a stack of matrices, and preset {preset!r} has one "
            "scale per parameter: use one with block scales, such as 'balanced' or 'lean'"
        )


def scales_by_rows(p: Tensor, spec: QuantSpec, scale: Tensor) -> Tensor:
    """Expand the scales of a stack to one row per weight row: [groups * rows, blocks per row]."""
    groups, rows = p.shape[0], prod(p.shape[1:-1])
    if spec.block[0] is None:
        return scale.reshape(groups, 1, -1).expand(-1, rows, -1).reshape(groups * rows, -1)
    return scale.repeat_interleave(spec.block[0], 1)[:, :rows].reshape(groups * rows, -1)


def blocks_of(p: Tensor, spec: QuantSpec, group: int) -> slice:
    """Return the rows of a stack's flattened scales that belong to one matrix."""
    height = spec.block[0]
    each = 1 if height is None else -(-p.shape[1] // height)
    return slice(group * each, (group + 1) * each)


def together(each: list[Tensor], p: Tensor) -> Tensor:
    """Stack one tensor per matrix to [groups, ...]."""
    return torch.stack(each) if each else torch.empty((0,), dtype=torch.float32, device=p.device)


# ---- shards ----


def local(t: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, unwrapped from `gather_quantized`'s classes, or the codes of a
    QuantizedTensor; any other tensor unchanged.
    """
    if isinstance(t, QuantizedTensor):
        return t.codes
    if not isinstance(t, DTensor):
        return t
    part = t.to_local()
    plain: Tensor = getattr(part, "plain", part)
    return plain


def like(p: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """Wrap a state like its parameter, as a DTensor with the same mesh and placements, for checkpoints.

    Args:
        p: the parameter.
        part: this rank's shard of the state.
        shape: shape of the whole state.
    """
    if not isinstance(p, DTensor) or part.dim() == 0:
        return part
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def shardings(p: Tensor) -> list[tuple[int, int]]:
    """Return (dimension, mesh dimension) of each sharding of a parameter, in the order in which it was applied.

    fully_shard shards what tensor parallelism has sharded before, although its mesh dimension comes first.
    """
    if not isinstance(p, DTensor):
        return []
    cuts = [(p.placements[over].dim, over) for over in range(p.device_mesh.ndim) if _cuts(p, over)]
    later = {over for _, over in cuts if hasattr(p.placements[over], "split_factor")}
    return [cut for cut in cuts if cut[1] not in later] + [cut for cut in reversed(cuts) if cut[1] in later]


def _cuts(p: DTensor, over: int) -> bool:
    return hasattr(p.placements[over], "dim") and p.device_mesh.size(over) > 1


def groups(p: Tensor) -> tuple[Any, ...]:
    """Return the process groups over which a parameter is sharded, in the order of `shardings`."""
    return tuple(p.device_mesh.get_group(over) for _, over in shardings(p))  # type: ignore[attr-defined]


def sharing(p: Tensor) -> tuple[Any, ...]:
    """Return all process groups of a sharded parameter, including those of replicas; empty if it is not sharded."""
    mesh: Any = p.device_mesh if shardings(p) else None  # type: ignore[attr-defined]
    return () if mesh is None else tuple(mesh.get_group(over) for over in range(mesh.ndim) if mesh.size(over) > 1)


def place(p: Tensor) -> ShardPosition:
    """Return the position of this rank's shard in the whole parameter."""
    start, stop = [0] * p.dim(), list(p.shape)
    for dim, over in shardings(p):
        mesh: Any = p.device_mesh  # type: ignore[attr-defined]
        part = -(-(stop[dim] - start[dim]) // mesh.size(over))
        start[dim] = min(stop[dim], start[dim] + part * mesh.get_local_rank(over))
        stop[dim] = min(stop[dim], start[dim] + part)
    own = tuple(local(p).shape)
    assert own == tuple(b - a for a, b in zip(start, stop, strict=True)), f"{own} of {start} to {stop}"
    return ShardPosition(tuple(start), own, tuple(p.shape))


def gradient(p: Tensor) -> Tensor:
    """Return this rank's shard of a gradient with its parameter's placements; may communicate, so all ranks
    must call it.
    """
    assert p.grad is not None
    if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        # For instance partial sums of a replicated parameter.
        return p.grad.redistribute(placements=p.placements).to_local()
    return part_of_gradient(p)


def part_of_gradient(p: Tensor) -> Tensor:
    """Return this rank's local gradient, a plain tensor unless it is quantized."""
    assert p.grad is not None
    return unwrapped(local(p.grad))


def agreed(finite: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """All-reduce the flags of which parameters' gradients are finite, bool [] each."""
    if not parameters:
        return finite
    bits = torch.stack([ok.to(parameters[0].device) for ok in finite]).logical_not().int()
    for group in {group: None for p in parameters for group in groups(p)}:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return [*(bits == 0).unbind()]


def check_divided(p: Tensor, config: StepConfig, preset: str) -> None:
    """Raise a ValueError if a sharded parameter cannot be stepped shard by shard."""
    cuts = shardings(p)
    if isinstance(p, DTensor) and stored_weight.owner(p) is not None and not stored_weight.holds_codes(p):
        raise ValueError(
            f"a stored weight of shape {tuple(p.shape)} was passed directly to fully_shard, which shards its values: "
            "call quaver.torch.parallel.gather_quantized(model) before fully_shard"
        )
    if not cuts:
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
    of_codes = config.weight_format.code_spec
    if of_codes is not None and (len(cuts) > 1 or cuts[0][0] != 0):
        raise ValueError(f"{sharded} by more than rows, which codes do not support: shard it by fully_shard only")
    height = 1 if of_codes is None else of_codes.block[0] or 1
    if config.predicts_scale and p.shape[0] % (height * p.device_mesh.size(cuts[0][1])) and height > 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"{sharded}, which cuts blocks of {height} whole rows, and preset {preset!r} needs their scales "
            "before a step: use fewer ranks, or a recipe with another block"
        )
    ranks = prod(p.device_mesh.size(over) for dim, over in cuts if dim == p.dim() - 1)  # type: ignore[attr-defined]
    for spec in config.moments:
        if ranks > 1 and spec.of.scaled and spec.block is not None and p.shape[-1] % (spec.block * ranks):
            raise ValueError(
                f"{sharded}, {ranks} of which shard its {p.shape[-1]} columns, and preset {preset!r} has a scale "
                f"for each {spec.block}: use preset='exact' or 'float32' for it, or fewer ranks for tensor "
                "parallelism"
            )


def value_of(p: Tensor) -> Tensor:
    """Return this rank's shard of the weight in float32."""
    if not stored_weight.holds_codes(p):
        return local(p).detach().float()
    layer: Any = stored_weight.owner(p)
    assert layer is not None
    if not shardings(p):
        value: Tensor = stored_weight.unsharded_weight(layer).dequantize(torch.float32)
        return value
    weight_format, (codes, scale) = in_own_rows(p, master_weights.WeightFormat("residual", layer.weight_spec))
    assert weight_format.code_spec is not None
    return master_weights.values(weight_format.code_spec, codes, scale)


def initial_of(p: Tensor, config: StepConfig) -> Tensor | None:
    """Return this rank's rows of the high-precision value that a stored weight was quantized from, or None if there is
    none or the weight was written since.
    """
    if config.weight_format.code_spec is None or not config.weight_format.states:
        return None
    owner: Any = stored_weight.owner(p)
    initial = None if owner is None else state_of(owner).initial
    if initial is None:
        return None
    position = place(p)
    rows = slice(position.global_offset[0], position.global_offset[0] + position.local_shape[0])
    spec, transposed = owner.__dict__["weight_spec"], stored_weight.is_stored_transposed(owner)
    codes = QuantizedTensor.from_tensor(initial.to(p.device), spec, transposed).codes[rows]
    if not torch.equal(codes.view(torch.uint8), local(p).detach().view(torch.uint8)):
        return None
    return initial[rows].to(p.device, torch.float32)


def weight_of(p: Tensor, config: StepConfig) -> list[Tensor]:
    """Return the weight as a GEMM reads it, and for codes the scales of this rank's rows."""
    weight = [local(p).detach()]
    spec = config.weight_format.code_spec
    if spec is not None:
        owner = stored_weight.owner(p)
        assert owner is not None
        scale: Any = scales_of(owner)["weight_scale"]
        every = spec.block[0] is None or is_stack(p, spec)
        weight.append(scale if every else scale[block_rows(place(p), spec.block[0])])  # type: ignore[arg-type]
    return weight


def versions(p: Tensor) -> list[tuple[int, int]]:
    """Return (data pointer, version) of a stored weight's codes and scales, to detect writes that autograd tracks."""
    owner = stored_weight.owner(p)
    scale = None if owner is None else scales_of(owner)["weight_scale"]
    # Operations of a QuantizedTensor change its version, and kernels that of its codes.
    tensors = [t for t in (p, local(p), scale) if t is not None]
    return [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in tensors]


def block_rows(position: ShardPosition, height: int) -> slice:
    """Return the block rows that a shard has rows of."""
    start, stop = position.global_offset[0], position.global_offset[0] + position.local_shape[0]
    return slice(start // height, max(-(-stop // height), start // height) if stop > start else start // height)


def in_own_rows(
    p: Tensor, weight_format: master_weights.WeightFormat
) -> tuple[master_weights.WeightFormat, list[Tensor]]:
    """Return `weight_of` for reading, with one scale per row if needed.

    That is the case if this rank's rows begin within a block, or belong to several matrices.
    """
    codes, *scales = weight_of(p, StepConfig(None, weight_format, ()))  # type: ignore[arg-type]
    spec = weight_format.code_spec
    if spec is not None and is_stack(p, spec):
        return weight_format.by_rows, [rows(codes), scales_by_rows(p, spec, *scales)]
    if spec is None or spec.block[0] in (None, 1) or not shardings(p):
        return weight_format, [codes, *scales]
    position = place(p)
    own = torch.arange(
        position.global_offset[0],
        position.global_offset[0] + position.local_shape[0],
        dtype=torch.int64,
        device=codes.device,
    )
    height: Any = spec.block[0]
    return weight_format.by_rows, [codes, scales[0][own // height - position.global_offset[0] // height]]


def in_rows(t: Tensor) -> Tensor:
    """Return a row-major tensor: the same, or a copy, for instance of channels_last."""
    return t if t.dim() <= 2 or t.is_contiguous() else t.contiguous()


#: Rows shorter than this are merged with the preceding dimension, because each row has its own scales.
SHORT = 64
#: Largest block of any preset; if a shard of a column is a multiple of it, no block crosses shards.
WIDEST = 256


def num_leading_dims(p: Tensor, needs_matrix: bool) -> int:
    """Return how many leading dimensions of a parameter are flattened to rows; the others form the columns that blocks
    divide.

    Usually all but the last. For a convolution's weight, all but the spatial dimensions and channels; for a column [N,
    1], none.

    Args:
        p: the parameter.
        needs_matrix: the rule needs a whole matrix at once.
    """
    last, cuts = max(p.dim() - 1, 0), shardings(p)
    if needs_matrix or not p.numel() or stored_weight.holds_codes(p) or any(dim for dim, _ in cuts):
        return last
    leading = last
    while leading > 1 and prod(p.shape[leading:]) < SHORT:
        leading -= 1
    column = p.dim() > 1 and prod(p.shape[1:]) == 1 and local(p).is_contiguous()
    ranks = prod(p.device_mesh.size(over) for _, over in cuts)  # type: ignore[attr-defined]
    return 0 if column and (not cuts or p.shape[0] % (WIDEST * ranks) == 0) else leading


def flat(shape: Sequence[int], num_leading_dims: int) -> tuple[int, ...]:
    """Return a shape whose dimensions after the first `num_leading_dims` are flattened to one."""
    return (
        (*shape[:num_leading_dims], prod(shape[num_leading_dims:]))
        if num_leading_dims < len(shape) - 1
        else tuple(shape)
    )


def flat_place(p: Tensor, num_leading_dims: int) -> ShardPosition:
    """Return `place` with the trailing dimensions flattened; of these only a column may be sharded."""
    global_offset, local_shape, global_shape = place(p)
    if num_leading_dims >= len(local_shape) - 1:
        return ShardPosition(global_offset, local_shape, global_shape)
    return ShardPosition(
        (*global_offset[:num_leading_dims], 0 if num_leading_dims else global_offset[0]),
        flat(local_shape, num_leading_dims),
        flat(global_shape, num_leading_dims),
    )


def as_rows(parts: ParameterTensors, number: int = 0) -> ParameterTensors:
    """Return all tensors as matrices: leading dimensions become rows, and a vector becomes one row.

    Args:
        parts: tensors of a parameter.
        number: number of rows; 0 flattens all dimensions but the last.
    """
    if parts.weight[0].dim() == 0:
        # A single number, such as a temperature, has no quantized state and no scales.
        of_one = [[t.view(1, 1) for t in tensors] for tensors in (parts.weight, (m for (m,) in parts.moments))]
        return ParameterTensors(tuple(of_one[0]), tuple((t,) for t in of_one[1]), (parts.gradient[0].view(1, 1),))
    moments = tuple(tuple(rows(t, number) for t in moment_tensors) for moment_tensors in parts.moments)
    weight, gradient = (tuple(rows(t, number) for t in tensors) for tensors in (parts.weight, parts.gradient))
    return ParameterTensors(weight, moments, gradient)


def rows(t: Tensor, number: int = 0) -> Tensor:
    """Return a tensor as a matrix, with `number` rows if not 0; a per-tensor scale [] is unchanged."""
    if number and t.dim():
        return t if t.dim() == 2 and t.shape[0] == number else in_rows(t).reshape(number, -1)
    if t.dim() == 2 or t.dim() == 0:
        return t
    return t.view(1, -1) if t.dim() < 2 else in_rows(t).view(-1, t.shape[-1])
