"""Gather one weight that fully_shard or tensor parallelism has sharded, as codes and scales.

Each rank quantizes its own shard with amaxes that the ranks have agreed on, so that codes and scales equal those of the
unsharded weight bit for bit; then the bytes are all-gathered. If a shard ends within a block, this one weight is
gathered in high precision and then quantized.
"""

import math
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.recipes.spec import QuantSpec
from quaver.torch.conversion.export.operands import StoredOperand
from quaver.torch.linear import stored_weight
from quaver.torch.numerics import reference
from quaver.torch.numerics.quantized import Quantized, ScalarOverride
from quaver.torch.numerics.rounding import SMALLEST_NORMAL_BITS, magnitude_bits, rotate
from quaver.torch.operations import ops
from quaver.torch.operations.functional import quantize
from quaver.torch.state.history import amax


@torch.no_grad()
def gathered_operand(one: StoredOperand) -> Quantized:
    """Return the codes and scales [N, K] that fprop's GEMM consumes, of a weight that may be sharded.

    A collective for a sharded weight: all ranks of its mesh call it.
    """
    weight: Any = one.layer.get_parameter(one.last)
    if not is_sharded(weight):
        return one.operand()
    spec, shard = one.spec, stored_weight.code_shard(weight)
    if shard is not None:
        codes = unsharded(shard.as_bytes(weight))
        stored = stored_weight.of_codes(one.layer, codes, one.dtype).unwrap()
        if stored.spec == replace(spec, rounding="nearest", hadamard=False):
            return stored
        return ops.QUANTIZE(stored.dequantize(), spec)
    factor = one.factor(amax.WEIGHT)
    if _cuts_blocks(weight, spec):
        return ops.QUANTIZE(unsharded(weight), spec, None, factor)
    return _gathered_codes(weight, spec, factor)


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(tensor, "device_mesh")


def reshard(model: nn.Module) -> None:
    """Free the weights that fully_shard has gathered, so that parameters are its shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def groups_of(model: nn.Module) -> list[Any]:
    """Return the process groups over which parameters of a model are sharded."""
    reshard(model)
    sharded: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    meshes = dict.fromkeys(p.device_mesh for p in sharded)
    return list(dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)))


@torch.no_grad()
def unsharded(tensor: Any) -> Tensor:
    """Return the full tensor, all-gathered if it is a DTensor."""
    if not is_sharded(tensor):
        plain: Tensor = tensor.detach()
        return plain
    return _all_gather(_local_shard(tensor), tensor, tensor.placements, tensor.shape)


def _local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, without the subclass by which `gather_quantized` gathers it."""
    local: Any = tensor.to_local()
    plain: Tensor = getattr(local, "plain", local)
    return plain.detach()


def _all_gather(own: Tensor, like: Any, placements: Any, shape: Any) -> Tensor:
    """All-gather this rank's shard of a contiguous tensor with these placements on the mesh of another."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size(shape)
    stride = torch.empty(shape, dtype=own.dtype, device="meta").stride()
    part = DTensor.from_local(own, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return part.full_tensor()


def _sharding(weight: Any, axis: int) -> list[int]:
    """Return the mesh dimensions that shard an axis of a weight."""
    return [dim for dim, placement in enumerate(weight.placements) if getattr(placement, "dim", None) == axis]


def _cuts_blocks(weight: Any, spec: QuantSpec) -> bool:
    """Return True if a rank's shard ends within a block of the spec, or within a byte of codes."""
    for axis in (0, 1):
        dims = _sharding(weight, axis)
        if not dims:
            continue
        ranks = math.prod(weight.device_mesh.size(dim) for dim in dims)
        block = spec.block[axis] or 1
        if axis == 1:
            block = math.lcm(block, 2 if spec.format.packed else 1, 16 if spec.hadamard else 1)
        size = weight.shape[axis]
        # One mesh dimension may give the last ranks fewer rows, as torch.chunk does.
        chunks = axis == 0 and len(dims) == 1 and (block == 1 or ranks <= block) and -(-size // ranks) % block == 0
        if size % (ranks * block) and not chunks:
            return True
    return False


def _gathered_codes(weight: Any, spec: QuantSpec, factor: ScalarOverride) -> Quantized:
    """Quantize this rank's shard of a weight with agreed amaxes, and all-gather codes and scales."""
    own, mesh = _local_shard(weight), weight.device_mesh
    groups = [[mesh.get_group(dim) for dim in _sharding(weight, axis)] for axis in (0, 1)]
    reduced = [group for axis in (0, 1) if spec.block[axis] is None or spec.two_level for group in groups[axis]]
    bits = _amax_bits(own, spec) if reduced else None
    for group in reduced:
        # As integers NaN is above infinity, and infinity above numbers.
        dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    q = quantize(own, spec, None if bits is None else bits.view(torch.float32), factor=factor).upright()
    n, k = weight.shape
    data = _all_gather_bytes(q.data, weight, k // (2 if spec.format.packed else 1), (n, k), (1, 1))
    scale = q.scale
    if isinstance(scale, Tensor):
        scale = _all_gather_bytes(scale, weight, spec.blocks(n, k)[1], (n, k), spec.block)
    return Quantized(data, scale, spec, (n, k), False, q.tensor_factor)


def _amax_bits(own: Tensor, spec: QuantSpec) -> Tensor:
    """Return the amaxes of the blocks of a shard as bits, int32; for two-level scales that of the shard, [1, 1]."""
    values = own.to(torch.float32)
    bits = magnitude_bits(rotate(values) if spec.hadamard else values)
    if not spec.two_level:
        return reference.block_bits(bits, spec)
    largest = bits.amax().view(1, 1) if bits.numel() else bits.new_zeros((1, 1))
    return torch.where(largest < SMALLEST_NORMAL_BITS, 0, largest)


def _all_gather_bytes(
    own: Tensor, weight: Any, columns: int, shape: tuple[int, int], block: tuple[int | None, int | None]
) -> Tensor:
    """All-gather this rank's codes or scales of a weight [n, k], which has one row of them per row of blocks.

    Args:
        columns: columns of the full tensor.
        block: shape of a block of the weight; along None all ranks already have the same values.
    """
    from torch.distributed.tensor import Replicate

    placements = [
        Replicate() if (axis := getattr(each, "dim", None)) is None or block[axis] is None else each
        for each in weight.placements
    ]
    if all(isinstance(each, Replicate) for each in placements):
        return own
    rows = 1 if block[0] is None else -(-shape[0] // block[0])
    size = own.element_size()
    # An empty shard may have strides that torch does not view as bytes.
    parts = own.reshape(-1).view(torch.uint8).view(own.shape[0], own.shape[1] * size)
    return _all_gather(parts, weight, placements, (rows, columns * size)).contiguous().view(own.dtype)
