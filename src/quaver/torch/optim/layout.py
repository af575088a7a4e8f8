"""A parameter's tensors: whole on one device, this rank's shard of a DTensor, or a stack of matrices; their layout as
matrices for a step, and their creation.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.recipes.spec import QuantSpec
from quaver.reference.optimizer_state import StateSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.stored_weight import scales_of
from quaver.torch.optim import codes, master_weights
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.quantized_gradient import QuantizedGradient
from quaver.torch.optim.step import ParameterTensors, ShardPosition, StepConfig
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


def scales_by_rows(p: Tensor, spec: QuantSpec, scale: Tensor) -> Tensor:
    """Expand the scales of a stack to one row per weight row: [groups * rows, blocks per row]."""
    groups, rows = p.shape[0], prod(p.shape[1:-1])
    if spec.block[0] is None:
        return scale.reshape(groups, 1, -1).expand(-1, rows, -1).reshape(groups * rows, -1)
    return scale.repeat_interleave(spec.block[0], 1)[:, :rows].reshape(groups * rows, -1)


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
    offloaded = part.device.type != p.device_mesh.device_type
    # from_local would move a state in host memory to the mesh's device.
    wrapped = DTensor.from_local(
        part.to("meta") if offloaded else part,
        p.device_mesh,
        p.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
    return DTensor(part, wrapped._spec, requires_grad=False) if offloaded else wrapped


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
    grad = local(p.grad)
    return grad.value if isinstance(grad, QuantizedGradient) and grad.value is not None else grad


def local_quantized(gradient: Tensor | None) -> QuantizedGradient | None:
    """Return the gradient, or its local shard of a DTensor, if it is stored as codes or bfloat16; else None."""
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return own if isinstance(own, QuantizedGradient) and own.contents.value is None else None


def value_of(p: Tensor) -> Tensor:
    """Return this rank's shard of the weight in float32."""
    if not stored_weight.holds_codes(p):
        return local(p).detach().float()
    layer: Any = stored_weight.owner(p)
    assert layer is not None
    if not shardings(p):
        value: Tensor = stored_weight.unsharded_weight(layer).dequantize(torch.float32)
        return value
    weight_format, (data, scale) = in_own_rows(p, WeightFormat("residual", layer.weight_spec))
    assert weight_format.code_spec is not None
    return master_weights.values(weight_format.code_spec, data, scale)


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
    written = QuantizedTensor.from_tensor(initial.to(p.device), spec, transposed).codes[rows]
    if not torch.equal(written.view(torch.uint8), local(p).detach().view(torch.uint8)):
        return None
    return initial[rows].to(p.device, torch.float32)


def weight_of(p: Tensor, weight_format: WeightFormat) -> list[Tensor]:
    """Return the weight as a GEMM reads it, and for codes the scales of this rank's rows."""
    weight = [local(p).detach()]
    spec = weight_format.code_spec
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


def in_own_rows(p: Tensor, weight_format: WeightFormat) -> tuple[WeightFormat, list[Tensor]]:
    """Return `weight_of` for reading, with one scale per row if needed.

    That is the case if this rank's rows begin within a block, or belong to several matrices.
    """
    data, *scales = weight_of(p, weight_format)
    spec = weight_format.code_spec
    if spec is not None and is_stack(p, spec):
        return weight_format.by_rows, [rows(data), scales_by_rows(p, spec, *scales)]
    if spec is None or spec.block[0] in (None, 1) or not shardings(p):
        return weight_format, [data, *scales]
    position = place(p)
    start, stop = position.global_offset[0], position.global_offset[0] + position.local_shape[0]
    own = torch.arange(start, stop, dtype=torch.int64, device=data.device)
    return weight_format.by_rows, [data, scales[0][own // spec.block[0] - start // spec.block[0]]]


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


def rows(t: Tensor, number: int = 0, single: bool = False) -> Tensor:
    """Return a tensor as a matrix: leading dimensions become rows, and a vector becomes one row.

    Args:
        t: the tensor; a per-tensor scale [] is unchanged.
        number: number of rows; 0 flattens all dimensions but the last.
        single: the parameter is a single number, such as a temperature, which has no quantized state and no scales.
    """
    if single:
        return t.view(1, 1)
    if number and t.dim():
        return t if t.dim() == 2 and t.shape[0] == number else in_rows(t).reshape(number, -1)
    if t.dim() == 2 or t.dim() == 0:
        return t
    return t.view(1, -1) if t.dim() < 2 else in_rows(t).view(-1, t.shape[-1])


# ---- segments ----


class ShardSegment(NamedTuple):
    """Rows of a rank's shard: whole blocks, or part of one block row that crosses shards; or one matrix of a stack."""

    #: Rows within the rank's shard.
    rows: slice
    #: Block rows within the rank's shard; None if the weight has one scale, or scales by columns.
    blocks: slice | None
    #: Index in the whole weight of a block row that other ranks have rows of, too; None for whole blocks.
    crosses_shards: int | None
    #: Index of the matrix in a stack, or None.
    group: int | None = None


def segments(p: Tensor, config: StepConfig) -> list[ShardSegment]:
    """Split this rank's shard of a parameter where a block row that crosses shards begins or ends."""
    position, spec = place(p), config.weight_format.code_spec
    if is_stack(p, spec, config.rule.needs_matrix):
        groups, n = p.shape[:2]
        high = None if spec is None else 1 if spec.block[0] is None else -(-n // spec.block[0])
        cuts = [slice(group * n, (group + 1) * n) for group in range(groups)]
        block_slices = [None if high is None else slice(group * high, (group + 1) * high) for group in range(groups)]
        return [ShardSegment(cuts[group], block_slices[group], None, group) for group in range(groups)]
    every = slice(0, local(p).shape[0] if local(p).dim() else 1)
    if spec is None or not shardings(p):
        return [ShardSegment(every, None, None)]
    height, start, num_rows = spec.block[0], position.global_offset[0], position.global_shape[0]
    if height is None:
        return [ShardSegment(every, None, None if config.predicts_scale else 0)]
    stop = start + position.local_shape[0]
    if start == stop:
        return []
    first = min(stop, -(-start // height) * height)
    last = stop if stop == num_rows else max(first, stop // height * height)
    pieces = []
    for a, b in pairwise(sorted({start, first, last, stop})):
        blocks = slice(a // height - start // height, -(-b // height) - start // height)
        crosses = a % height != 0 or (b % height != 0 and b != num_rows)
        pieces.append(ShardSegment(slice(a - start, b - start), blocks, a // height if crosses else None))
    return pieces


def slice_segment(parts: ParameterTensors, segment: ShardSegment) -> ParameterTensors:
    """Select a segment from all tensors of a shard."""
    if segment.blocks is None and segment.group is None:
        return parts
    weight = tuple(
        t[segment.blocks if i == 1 and segment.blocks is not None else segment.rows] for i, t in enumerate(parts.weight)
    )
    moments = tuple(tuple(t[segment.rows] for t in moment_tensors) for moment_tensors in parts.moments)
    return ParameterTensors(weight, moments, tuple(t[segment.rows] for t in parts.gradient))


def at_segment(position: ShardPosition, segment: ShardSegment) -> ShardPosition:
    """Return the position of a shard's segment in the whole parameter."""
    if segment.group is not None:
        return ShardPosition(
            (segment.group, *position.global_offset[1:]), (1, *position.local_shape[1:]), position.global_shape
        )
    if segment.blocks is None:
        return position
    first = position.global_offset[0] + segment.rows.start
    rows = segment.rows.stop - segment.rows.start
    return ShardPosition((first, *position.global_offset[1:]), (rows, *position.local_shape[1:]), position.global_shape)


# ---- tensors of a step, and states ----

#: Suffix of keys of moments stored as codes. torch does not know such keys, so it never reads codes as values.
CODES = "_codes"


def key_of(moment: str, spec: StateSpec) -> str:
    """Return the key of a moment in a parameter's state."""
    return moment + CODES if spec.of.scaled else moment


def tensors_of_weight(p: Tensor, config: StepConfig, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors that represent a parameter's weight: this rank's shards, as matrices, in `WeightFormat`'s
    order. States may be on another device than the weight.
    """
    states = [local(state[name]) for name in config.weight_format.states]
    return tuple(rows(t) for t in (*weight_of(p, config.weight_format), *states))


def moment_tensors(state: Mapping[str, Tensor], name: str, spec: StateSpec) -> tuple[Tensor, ...]:
    """Return this rank's shards of a moment: its values, or codes and scales."""
    return tuple(local(state[key]) for key in (key_of(name, spec), f"{name}_scale") if key in state)


def tensors_of(
    p: Tensor, config: StepConfig, state: Mapping[str, Tensor], given: tuple[Tensor, ...] | None = None
) -> ParameterTensors:
    """Return all tensors that a parameter's step reads and writes: this rank's shards, as matrices.

    Args:
        p: the parameter.
        config: its step configuration.
        state: its state.
        given: a float tensor, or codes and scale, that the step uses as gradient; None for that of `p.grad`.
    """
    moments = tuple(
        moment_tensors(state, name, spec) for name, spec in zip(config.rule.names, config.moments, strict=True)
    )
    if given is None:
        quantized = local_quantized(p.grad)
        given = (gradient(p),) if quantized is None else quantized.contents.codes or ()
    leading = num_leading_dims(p, config.rule.needs_matrix)
    # Nonzero only if trailing dimensions are flattened, and 0 for a shard without rows.
    number = prod(local(p).shape[:leading]) if leading < p.dim() - 1 else 0
    return ParameterTensors(
        tuple(rows(t, number, p.dim() == 0) for t in tensors_of_weight(p, config, state)),
        tuple(tuple(rows(t, number, p.dim() == 0) for t in each) for each in moments),
        tuple(rows(t, number, p.dim() == 0) for t in given),
    )


def amaxes(p: Tensor, config: StepConfig, tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the amaxes of a weight's blocks, sharded like its rows; for a sharded weight, those of this rank's rows.

    Args:
        p: the parameter.
        config: its step configuration, which predicts scales.
        tensors: result of `tensors_of_weight`.
    """
    spec, weight_format = config.weight_format.code_spec, config.weight_format
    assert spec is not None
    if is_stack(p, spec):
        every = [slice_segment(ParameterTensors(tensors, (), ()), segment).weight for segment in segments(p, config)]
        each = [master_weights.block_amax(spec, master_weights.read(weight_format, own)) for own in every]
        return torch.stack(each) if each else torch.empty((0,), dtype=torch.float32, device=p.device)
    amax = master_weights.block_amax(spec, master_weights.read(weight_format, tensors))
    height = spec.block[0]
    return amax if height is None else like(p, amax, (-(-p.shape[0] // height), amax.shape[1]))


def kinds_of_states(p: Tensor, config: StepConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Return the shape of this rank's shard, the shape of the whole, and the dtype of each moment and its scales."""
    own, leading = local(p), num_leading_dims(p, config.rule.needs_matrix)
    kinds = {}
    for name, spec in zip(config.rule.names, config.moments, strict=True):
        kinds[key_of(name, spec)] = tuple(own.shape), tuple(p.shape), codes.code_dtype(spec.of)
        if spec.of.scaled:
            shape, whole = (codes.scale_shape(flat(t.shape, leading), spec.block, spec.of.numbers) for t in (own, p))
            kinds[f"{name}_scale"] = shape, whole, codes.SCALE_DTYPES[spec.scale]
    return kinds


def bytes_of_states(p: Tensor, config: StepConfig) -> int:
    """Return the bytes of a parameter's states on a rank with an even share of it: the same on all ranks."""
    moments = sum(prod(whole) * dtype.itemsize for _, whole, dtype in kinds_of_states(p, config).values())
    weight = sum(p.numel() * config.weight_format.dtype.itemsize for _ in config.weight_format.states[:1])
    return (moments + weight) // prod(dist.get_world_size(group) for group in groups(p))


def first_state(p: Tensor, config: StepConfig, device: torch.device) -> dict[str, Tensor]:
    """Create the state of a parameter before its first step, without the amaxes that predict scales.

    Args:
        p: the parameter.
        config: its step configuration.
        device: device of the moments and of a master or residual.
    """
    own, on_gpu = local(p), p.device if p.device.type == "cuda" else "cpu"
    state = {"step": torch.zeros((), dtype=torch.float32, device=on_gpu)}
    state |= {name: torch.zeros((), dtype=torch.float64, device=on_gpu) for name in config.rule.numbers}
    for name, (shape, whole, dtype) in kinds_of_states(p, config).items():
        state[name] = like(p, torch.zeros(shape, dtype=dtype, device=device), whole)
    value = value_of(p).to(device) if config.weight_format.master else None
    weight_states = master_weights.first_states(config.weight_format, own, value, device)
    initial = initial_of(p, config)
    if initial is not None:
        # The layer stores its value from before quantization: start from that instead of the codes.
        weight_format, tensors = in_own_rows(p, config.weight_format)
        tensors = [t.to(device) for t in tensors]
        states = master_weights.around(weight_format, rows(initial.to(device)), (*tensors, *map(rows, weight_states)))
        weight_states = tuple(t.view(own.shape) if t.dim() else t for t in states)
    for name, tensor in zip(config.weight_format.states, weight_states, strict=True):
        state[name] = like(p, tensor, p.shape) if tensor.shape == own.shape else tensor
    return state


def check_state(p: Tensor, config: StepConfig, state: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a moment, its scales or an additional state is missing or has another shape or
    dtype.
    """
    expected = {name: (shape, dtype) for name, (shape, _, dtype) in kinds_of_states(p, config).items()}
    for name in config.weight_format.states[:1]:
        expected[name] = tuple(local(p).shape), config.weight_format.dtype
    for name, (shape, dtype) in expected.items():
        found = None if name not in state else local(state[name])
        if found is None or (tuple(found.shape), found.dtype) != (shape, dtype):
            found_text = "is missing" if found is None else f"has shape {tuple(found.shape)} and dtype {found.dtype}"
            raise ValueError(
                f"{name} of a parameter of shape {tuple(p.shape)} and {p.dtype} {found_text}, where {dtype} of shape "
                f"{shape} was expected: the parameter or its group's preset changed after the state was made. Take "
                "state_dict() before such a change and load it after it, or begin anew by `del optimizer.state[p]`"
            )
